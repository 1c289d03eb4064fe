"""Programs for those who work on the simulator: no command and no figure needs them, and no wheel has them."""
