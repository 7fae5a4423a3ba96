"""In the background: exchanges that go on while the gradient is computed."""
