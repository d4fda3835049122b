"""Reads the configuration of other Pusher-compatible servers, and plans what redpoll takes over from it.

documents.py and php.py read the files, a module for each server maps what it finds to apps and settings, and plan.py
holds the result: apps to create, settings of the server, and a row for everything that was found.
control/commands/app_import.py carries the plan out.
"""
