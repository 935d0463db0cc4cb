"""The playground in headless Chromium, with real servers.

Needs a Chromium (Debian's, for example) and the package playwright; the tests are skipped if either
is missing. Each test compares the page with the API.
"""
