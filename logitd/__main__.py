"""`python -m logitd`: runs the same command line as the script `logitd`."""

from logitd.service.cli.start import main

if __name__ == "__main__":
    main()
