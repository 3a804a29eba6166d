# Licensed under the Apache License, Version 2.0. See LICENSE.
"""That tests run where the environment names a proxy."""

import os
from unittest import mock
from urllib import request

import testtools

from tests import no_proxy


class NoProxyTest(testtools.TestCase):

    def test_both_spellings(self):
        with mock.patch.dict(os.environ, {
                'http_proxy': 'http://proxy.example:3128',
                'HTTPS_PROXY': 'http://proxy.example:3128',
                'all_proxy': 'socks5://proxy.example', 'KEPT': 'it'}):
            no_proxy.apply()
            self.assertEqual({}, request.getproxies_environment())
            self.assertEqual('it', os.environ['KEPT'])
