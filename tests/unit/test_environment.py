# Licensed under the Apache License, Version 2.0. See LICENSE.

import os
from unittest import mock
from urllib import request

import testtools

from tests import environment


class ClearTest(testtools.TestCase):

    def test_what_goes(self):
        with mock.patch.dict(os.environ, {
                'http_proxy': 'http://proxy.example:3128',
                'HTTPS_PROXY': 'http://proxy.example:3128',
                'all_proxy': 'socks5://proxy.example',
                'OS_CLOUD': 'theirs', 'OS_PASSWORD': 'secret',
                'OS_DEBUG': '1', 'KEPT': 'it'}):
            environment.clear()
            self.assertEqual({}, request.getproxies_environment())
            self.assertEqual([None, None, '1', 'it'], [
                os.environ.get(name) for name in (
                    'OS_CLOUD', 'OS_PASSWORD', 'OS_DEBUG', 'KEPT')])
