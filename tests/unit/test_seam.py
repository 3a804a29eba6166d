# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The methods of Nova's scheduler that are wrapped.

That Nova calls them as expected is in tests/functional, in
test_scheduler_placement and test_no_valid_host.
"""

import itertools
import types
from unittest import mock

from nova import exception
from nova.scheduler import manager
import oslo_messaging as messaging
import testtools

from nova_accel.scheduler import seam


class AnswerTest(testtools.TestCase):

    def nova(self, method):
        """A SchedulerManager with another method, or without it."""
        ours = type('SchedulerManager', (), {
            '_select_destinations': method} if method else {})
        patch = mock.patch.object(manager, 'SchedulerManager', ours)
        patch.start()
        self.addCleanup(patch.stop)
        return ours()

    @staticmethod
    def as_known(self, context, spec_obj, instance_uuids,
                 alloc_reqs_by_rp_uuid, provider_summaries, version=None,
                 return_alternates=False):
        return alloc_reqs_by_rp_uuid, version, return_alternates

    def test_shown_before_nova_reads_it(self):
        scheduler = self.nova(self.as_known)

        def look(manager, context, spec, candidates, summaries):
            candidates[spec] = summaries
        for _ in range(2):
            self.assertTrue(seam.install_answer(look))
        self.assertEqual(
            ({'spec': 'summaries'}, '1.36', True),
            scheduler._select_destinations(
                'context', 'spec', ['uuid'], {}, 'summaries', '1.36',
                return_alternates=True))
        # a rebuild
        self.assertEqual((None, None, False), scheduler._select_destinations(
            'context', 'spec', ['uuid'], None, None))

    def test_an_error_leaves_what_is_there(self):
        scheduler = self.nova(self.as_known)

        def look(*args):
            raise ConnectionError('HTTP 500')
        seam.install_answer(look)
        with self.assertLogs(seam.LOG.logger, 'WARNING') as logs:
            self.assertEqual({}, scheduler._select_destinations(
                'context', 'spec', ['uuid'], {}, {})[0])
        self.assertIn('HTTP 500', logs.output[0])

    def test_some_hosts_first(self):
        passed = []

        def few(self, context, spec_obj, instance_uuids,
                alloc_reqs_by_rp_uuid, provider_summaries):
            passed.append(provider_summaries)
            if provider_summaries == 'some':
                raise exception.NoValidHost(reason='')
            return 'hosts'
        arguments = 'context', 'spec', ['uuid'], {}, 'all'
        for widen, raises in ((lambda spec: spec == 'spec', False),
                              (lambda spec: False, True),
                              (lambda spec: 1 / 0, True)):
            scheduler = self.nova(few)
            seam.install_answer(lambda *args: 'some', widen)
            passed.clear()
            if raises:
                self.assertRaises(exception.NoValidHost,
                                  scheduler._select_destinations, *arguments)
            else:
                self.assertEqual(
                    'hosts', scheduler._select_destinations(*arguments))
            self.assertEqual(['some', 'all'][:2 - raises], passed)

    def test_another_nova(self):
        def renamed(self, context, spec):
            return 'hosts'
        for method in None, renamed:
            scheduler = self.nova(method)
            with self.assertLogs(seam.LOG.logger, 'ERROR') as logs:
                self.assertFalse(seam.install_answer(self.fail))
            self.assertIn('install a release of nova_accel', logs.output[0])
            self.assertIs(method, getattr(
                type(scheduler), '_select_destinations', None))


class ReasonTest(testtools.TestCase):
    """NoValidHost with what we know, through the RPC server's wrapper."""

    def nova(self, error):
        """A SchedulerManager that raises an error as Nova's does."""
        class SchedulerManager:

            @messaging.expected_exceptions(exception.NoValidHost)
            def select_destinations(self, context, **kwargs):
                self.passed = context, kwargs
                if isinstance(error, exception.RequestFilterFailed):
                    try:
                        raise error
                    except exception.RequestFilterFailed:
                        raise exception.NoValidHost(reason='a filter')
                if error:
                    raise error
                return 'hosts'
        patch = mock.patch.object(manager, 'SchedulerManager',
                                  SchedulerManager)
        patch.start()
        self.addCleanup(patch.stop)
        return SchedulerManager()

    def raised(self, scheduler, **kwargs):
        """What nova-conductor reads."""
        caught = self.assertRaises(
            messaging.ExpectedException, scheduler.select_destinations,
            'context', **kwargs)
        kind, error, _ = caught.exc_info
        self.assertIs(exception.NoValidHost, kind)
        return error.format_message()

    SPEC = types.SimpleNamespace(num_instances=3)

    def assertRaises(self, kind, function, *args, **kwargs):
        with super().assertRaises(kind) as caught:
            function(*args, **kwargs)
        return caught.exception

    def test_reason(self):
        asked = []
        scheduler = self.nova(exception.NoValidHost(reason=''))
        for _ in range(2):
            seam.install_reason(
                lambda *args: asked.append(args) or 'No FPGA is free.')
        for uuids, servers in ((['1', '2'], 2), (None, 3)):
            self.assertEqual(
                'No valid host was found. No FPGA is free.', self.raised(
                    scheduler, spec_obj=self.SPEC, instance_uuids=uuids))
            *args, seconds = asked.pop()
            self.assertEqual([scheduler, 'context', self.SPEC, servers], args)
            self.assertTrue(0 <= seconds < 60, seconds)
        self.assertEqual([], asked)

    def test_error_of_nova_stays(self):
        for error, why in (
                (exception.NoValidHost(reason='by Nova'), lambda *args: ''),
                (exception.NoValidHost(reason='by Nova'),
                 lambda *args: 1 / 0),
                (exception.RequestFilterFailed(reason='zone'), self.fail)):
            with self.subTest(error=error):
                scheduler = self.nova(error)
                seam.install_reason(why)
                with self.assertLogs(seam.LOG.logger, 'DEBUG') as log:
                    seam.LOG.debug('begin')
                    text = self.raised(scheduler, spec_obj=self.SPEC,
                                       instance_uuids=['1'])
                self.assertIn(text, ('No valid host was found. by Nova',
                                     'No valid host was found. a filter'))
        self.assertEqual(1, len(log.output))

    def test_request_that_is_not_an_object(self):
        scheduler = self.nova(exception.NoValidHost(reason='by Nova'))
        seam.install_reason(self.fail)
        self.assertEqual('No valid host was found. by Nova',
                         self.raised(scheduler, request_spec={}))

    def test_other_results(self):
        scheduler = self.nova(None)
        seam.install_reason(self.fail)
        self.assertEqual('hosts', scheduler.select_destinations(
            'context', spec_obj=self.SPEC))
        self.assertEqual(('context', {'spec_obj': self.SPEC}),
                         scheduler.passed)
        scheduler = self.nova(KeyError('host'))
        seam.install_reason(self.fail)
        self.assertRaises(KeyError, scheduler.select_destinations, 'context',
                          spec_obj=self.SPEC)

    def test_retry(self):
        scheduler = self.nova(exception.NoValidHost(reason='by Nova'))
        left = [1, 1, 1, 0]
        seam.install_reason(lambda *args: '',
                            retry=lambda spec: bool(left.pop(0)))
        with mock.patch.object(seam.time, 'sleep') as slept, mock.patch.object(
                seam.random, 'uniform', lambda least, most: most), (
                mock.patch.object(seam.time, 'monotonic', itertools.count(
                    step=5).__next__)):
            self.raised(scheduler, spec_obj=self.SPEC, instance_uuids=['1'])
        self.assertEqual([], left)
        # twice and four times as long as it took, and the longest delay
        self.assertEqual([mock.call(10), mock.call(20), mock.call(30)],
                         slept.call_args_list)
        # another error is logged, and that of Nova stays
        with self.assertLogs(seam.LOG.logger, 'ERROR'):
            self.assertEqual('No valid host was found. by Nova', self.raised(
                scheduler, spec_obj=self.SPEC, instance_uuids=['1']))

    def test_before(self):
        told = []

        def before(*args):
            told.append(args)
            raise ValueError('before')
        scheduler = self.nova(None)
        seam.install_reason(self.fail, before=before)
        with self.assertLogs(seam.LOG.logger, 'ERROR'):
            self.assertEqual('hosts', scheduler.select_destinations(
                'context', spec_obj=self.SPEC, instance_uuids=['1']))
        scheduler.select_destinations('context', request_spec={})
        self.assertEqual([('context', self.SPEC, ['1'])], told)

    def test_another_nova(self):
        with mock.patch.object(manager, 'SchedulerManager', object):
            seam.install_reason(self.fail)
