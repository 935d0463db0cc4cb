"""The API: endpoints, the way in and the way out, and OpenAI's API."""
