"""What happens, in simulated time. Imports nothing of the other packages."""
