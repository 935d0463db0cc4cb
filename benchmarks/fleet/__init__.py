"""How many servers a load needs: predicted from measured step times, and held against real ones."""
