"""A server between a client and a real one, which hangs, dies or changes answers as a test says."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from jmarl.remote import environments_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"]
NAME = SERVICE.full_name


class Between(grpc.GenericRpcHandler):
    """Passes the bytes of calls on.

    `lie(method, reply)` changes a reply in place or returns other bytes; `hangs` names methods without an answer,
    `refuses` those that are answered with a code.
    """

    def __init__(self, address, lie=None, hangs=(), refuses=None):
        self.channel, self.lie, self.hangs = grpc.insecure_channel(address), lie, hangs
        self.refuses = {} if refuses is None else refuses
        self.ended = threading.Event()
        self.calls = []  # methods
        self.slow = None  # a method that takes a while

    def service(self, details):
        method = details.method.rpartition("/")[2]

        def handle(request, context):
            self.calls.append(method)
            if method in self.hangs:
                self.ended.wait(20)
            if method == self.slow:
                self.ended.wait(0.3)
                if not context.is_active():
                    return b""
            if method in self.refuses:
                context.abort(self.refuses[method], "refused by the test")
            try:
                call = self.channel.unary_unary(details.method)
                reply = call(request, timeout=20, metadata=context.invocation_metadata())
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            if self.lie is None or method in ("Describe", "Tasks", "Close") and not getattr(self.lie, "of_description", False):
                return reply
            message = getattr(pb, SERVICE.methods_by_name[method].output_type.name).FromString(reply)
            other = self.lie(method, message)
            return other if isinstance(other, bytes) else message.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(handle)


@contextlib.contextmanager
def between(address, lie=None, hangs=(), refuses=None):
    """Yield the address of such a server, and the object."""
    handler = Between(address, lie, hangs, refuses)
    server = grpc.server(ThreadPoolExecutor(8), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", handler
    finally:
        handler.ended.set()
        server.stop(0).wait()
        handler.channel.close()
