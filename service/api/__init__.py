"""The API: endpoints, the way in and the way out, and the APIs of other programs."""
