"""Links of our own: one connection a link, with keys."""
