"""The dashboard: HTML pages for operators, served on the control port only.

access.py checks sessions, roles and forms. dashboard.py puts the pages together. Each other module has one group of
pages or one helper, and renders templates/ with pages.py.
"""
