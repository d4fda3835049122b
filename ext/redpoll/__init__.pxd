# The folder that lets the extensions cimport each other as redpoll._x; the Python package is src/redpoll.
