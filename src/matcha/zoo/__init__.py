"""What is trained: tasks with their data and models, and recipes by name."""
