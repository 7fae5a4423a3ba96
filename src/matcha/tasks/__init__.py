"""What is trained: data, model and loss of m workers, for either engine."""
