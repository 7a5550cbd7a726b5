"""Routes of the HTTP server: POST /kvtier/hint, clients say when a session returns; GET
/kvtier/requests, what is known of each request.
"""
