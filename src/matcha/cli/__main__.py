"""`python -m matcha.cli` is `matcha`."""

from matcha.cli import main

if __name__ == "__main__":
    main()
