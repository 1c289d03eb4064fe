"""What several commands use: inputs, grids, parallel execution, stores that resume, console output."""
