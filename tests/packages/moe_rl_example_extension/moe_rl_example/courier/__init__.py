"""Courier, a framework that only this package knows."""
