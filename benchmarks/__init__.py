"""Speed, measured: each script prints its figures and writes results/NAME.json."""
