# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What goes wrong around a host: answers of Placement, and crashes."""

import contextlib
import json
from unittest import mock

from keystoneauth1 import exceptions as ks_exc
from nova.scheduler.client import report
import requests

#: how Placement can fail to say what a server is allocated: status 500, no
#: answer in time, an answer without any allocation
ANSWERS = ('error', 'timeout', 'empty')


@contextlib.contextmanager
def allocations_answered(answer):
    """Placement answers so whoever asks for the allocations of a server.

    Only for servers that have allocations: the scheduler asks, too, before it
    makes them.

    :param answer: one of ANSWERS.
    :returns: a list; the path of each spoilt request is added.
    """
    get, spoilt = report.SchedulerReportClient.get, []

    def spoiling(client, url, *args, **kwargs):
        response = get(client, url, *args, **kwargs)
        if (not url.startswith('/allocations/')
                or not response.json().get('allocations')):
            return response
        spoilt.append(url)
        if answer == 'timeout':
            raise ks_exc.ConnectTimeout('Placement does not answer')
        return _response(500, {}) if answer == 'error' else _response(
            200, {**response.json(), 'allocations': {}})
    with mock.patch.object(report.SchedulerReportClient, 'get', spoiling):
        yield spoilt


def _response(status, body):
    response = requests.Response()
    response.status_code = status
    response._content = json.dumps(body).encode()
    return response
