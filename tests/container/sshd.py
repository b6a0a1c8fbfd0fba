"""A stand-in for sshd: Determined's launch layer waits for its greeting; the stand-in for pdsh does the rest."""

import socket
import sys

with socket.create_server(("", int(sys.argv[1]))) as server:
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"SSH-2.0-test\r\n")
