# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The one method of Nova's scheduler that is wrapped.

That Nova calls it as expected is in tests/functional/test_scheduler_placement.
"""

import unittest
from unittest import mock

from nova.scheduler import manager

from nova_accel.scheduler import seam


class SeamTest(unittest.TestCase):

    def nova(self, method):
        """A SchedulerManager with another method, or without it."""
        class SchedulerManager:
            pass
        if method:
            SchedulerManager._get_all_host_states = method
        patch = mock.patch.object(manager, 'SchedulerManager',
                                  SchedulerManager)
        patch.start()
        self.addCleanup(patch.stop)
        return SchedulerManager()

    @staticmethod
    def as_known(self, context, spec_obj, provider_summaries):
        return context, spec_obj, provider_summaries

    def test_told_and_passed_on(self):
        told = []
        scheduler = self.nova(self.as_known)
        self.assertTrue(seam.install(lambda *args: told.append(args)))
        self.assertEqual(('context', 'spec', None),
                         scheduler._get_all_host_states(
                             'context', 'spec', None))
        self.assertEqual(('context', 'spec', {}),
                         scheduler._get_all_host_states(
                             'context', 'spec', provider_summaries={}))
        self.assertEqual([('spec', None), ('spec', {})], told)

    def test_once(self):
        told = []
        scheduler = self.nova(self.as_known)
        for _ in range(2):
            self.assertTrue(seam.install(lambda *args: told.append(args)))
        scheduler._get_all_host_states('context', 'spec', {})
        self.assertEqual(1, len(told))

    def test_an_error_of_ours_fails_no_scheduling(self):
        scheduler = self.nova(self.as_known)
        seam.install(lambda spec, summaries: summaries['resources'])
        with self.assertLogs(seam.LOG.logger, 'ERROR'):
            self.assertEqual(('context', 'spec', {}),
                             scheduler._get_all_host_states(
                                 'context', 'spec', {}))

    def test_another_nova(self):
        def renamed(self, context, spec, provider_summaries):
            return 'hosts'

        def one_more(self, context, spec_obj, provider_summaries, cells):
            return 'hosts'
        for method in (None, renamed, one_more):
            with self.subTest(method):
                scheduler = self.nova(method)
                with self.assertLogs(seam.LOG.logger, 'ERROR') as logs:
                    self.assertFalse(seam.install(self.fail))
                self.assertIn('install a release of nova_accel',
                              logs.output[0])
                self.assertIs(method, getattr(
                    type(scheduler), '_get_all_host_states', None))
