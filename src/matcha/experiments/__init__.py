"""Tasks, recipes and the paper's figures."""
