"""Routes of the HTTP server: POST /kvtier/hint, by which clients announce when a session returns;
GET /kvtier/requests, which shows what is known of each request.
"""
