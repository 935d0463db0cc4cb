"""`python -m logitd`: the command line, as the script `logitd` runs it."""

from logitd.service.cli.start import main

if __name__ == "__main__":
    main()
