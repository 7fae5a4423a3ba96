"""How to train: settings, optimizers, momentum, evaluation and jobs, for either engine."""
