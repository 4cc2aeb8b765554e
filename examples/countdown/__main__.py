"""`python -m examples.countdown CONFIG.yaml [section.key=value ...]`."""

from examples.countdown.run import main

if __name__ == "__main__":
    main()
