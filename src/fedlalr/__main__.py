"""`python -m fedlalr`."""

from fedlalr.cli import main

if __name__ == "__main__":
    main()
