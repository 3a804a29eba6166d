# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Answers of Placement, and of what is not Placement."""

import types

import requests


#: JSON with more levels than Python reads
DEEP = b'[' * 100_000


def response(**answer):
    return types.SimpleNamespace(status_code=200, json=lambda: answer)


def not_placements():
    """Answers with status 200 of something in Placement's place."""
    for content in (b'<html>It works.</html>', b'{"resource_prov', b'', b'5',
                    b'[]', b'{"resource_providers": 5}', DEEP):
        answer = requests.Response()
        answer.status_code, answer._content = 200, content
        yield answer
