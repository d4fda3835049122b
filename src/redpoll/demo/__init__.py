"""`redpoll demo`: a page with four examples that work at once, on a server of its own or on a running one.

deploy/examples/ has the same examples as folders to copy; `deploy/examples/generate` makes these from the files here.
"""
