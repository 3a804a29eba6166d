# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Rows of the history of hand-overs."""

from nova_accel.store import values

A, B = '0000:5e:00.0', '0000:81:00.0'


def server(number: int) -> str:
    """UUID of a server."""
    return f'00000000-0000-4000-8000-{number:012}'


def handover(number, **more):
    return values.Handover(**{
        'time': f'2026-11-22T02:17:{number:02}+00:00', 'device': A,
        'serial': '02:00:00:00:00:01', 'handle': A, 'server': server(number),
        'method': 'reset flr', 'result': 'clean', **more})
