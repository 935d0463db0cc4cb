"""The number of servers that a load needs: predicted from step times, compared with real ones."""
