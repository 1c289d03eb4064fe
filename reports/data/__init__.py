"""Result folders, read and checked, and tables made of them."""
