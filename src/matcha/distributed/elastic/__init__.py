"""A network that lives: workers that come late or back, and plans that follow the links."""
