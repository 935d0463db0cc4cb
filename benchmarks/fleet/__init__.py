"""Predicts from step times how many servers a load needs, and compares the prediction with real
servers.
"""
