# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What is asked of Placement for a request without a host, and for how long.

The sentences are in test_missing, real answers in
tests/functional/test_no_valid_host.
"""

import threading
import types
from unittest import mock
from urllib import parse

from nova import objects
from nova.scheduler import utils
import testtools

from nova_accel import request
from nova_accel.scheduler import candidates
from nova_accel.scheduler import fault
from nova_accel.scheduler.missing import Answer
from nova_accel.scheduler import scheduling
from nova_accel.scheduler import slow
from tests.unit import answers

FPGA = 'CUSTOM_ACCELERATOR_FPGA'
SPECS = {f'resources1:{FPGA}': '1'}
TAKEN = 'Accelerators: no host for this server has a free FPGA: try again '\
        'later, or choose another flavor.'


class FaultTest(testtools.TestCase):

    def setUp(self):
        super().setUp()
        objects.register_all()
        self.urls = []
        self.begun = scheduling.Schedulings(get=None)
        query = types.SimpleNamespace(
            to_querystring=lambda: f'resources=VCPU:1&resources1={FPGA}:1')
        patch = mock.patch.object(utils, 'resources_from_request_spec',
                                  lambda *args: query)
        # a machine under load takes longer, and no test fails for that
        for patch in (patch, mock.patch.object(fault, 'LIMIT', 600),
                      mock.patch.object(candidates, 'ZONES',
                                        candidates.Zones())):
            patch.start()
            self.addCleanup(patch.stop)

    @staticmethod
    def spec(specs=SPECS, hints=None):
        return objects.RequestSpec(
            flavor=objects.Flavor(extra_specs=specs), num_instances=1,
            instance_uuid='00000000-0000-4000-8000-000000000001',
            scheduler_hints=hints or {})

    def reason(self, get, spec=None, seconds=0):
        manager = types.SimpleNamespace(host_manager=None)
        return fault.reason(get, self.begun, manager, None,
                            spec or self.spec(), 1, seconds)

    def taken(self, url, version):
        """Placement has a host, and nothing is free on it."""
        self.urls.append(url)
        return self.response(200, {
            'resource_providers': [{}] * (FPGA not in url),
            'allocation_requests': [{}] * (FPGA not in url)})

    @staticmethod
    def response(status, body):
        return types.SimpleNamespace(
            status_code=status, json=lambda: body, text=str(body))

    def test_told_and_logged(self):
        with self.assertLogs(fault.LOG.logger, 'INFO') as log:
            self.assertEqual(TAKEN, self.reason(self.taken))
        self.assertIn(f'No host for server {self.spec().instance_uuid}: '
                      f'{TAKEN}', log.output[0])
        # the group, and a host for the server at all
        self.assertEqual(2, len(self.urls), self.urls)

    def test_slow_placement(self):
        """The three options are named if the request is one that they make
        fast, to the owner only if there is room."""
        several = self.spec({f'resources{n}:{FPGA}': '1' for n in range(4)})

        def unavailable(url, version):
            raise ConnectionError('no answer')
        for spec, get, seconds, owner, operator in (
                (several, unavailable, 13.8, True, True),
                (several, self.taken, 13.8, False, True),
                (several, unavailable, 4.9, False, False),
                (self.spec(), unavailable, 600, False, False)):
            with self.assertLogs(fault.LOG.logger, 'INFO') as log:
                fault.LOG.info('')
                reason = self.reason(get, spec, seconds)
            for found, expected in ((reason, owner),
                                    (' '.join(log.output), operator)):
                for text in ('took 14 s', slow.OPTIONS, 'placement.conf'):
                    self.assertEqual(expected, text in found, found)
            self.assertLessEqual(
                len(f'No valid host was found. {reason}'), 255)

    def test_answers_of_something_else(self):
        """They are as no answer."""
        for answer in answers.not_placements():
            with self.assertLogs(fault.LOG.logger, 'WARNING') as log:
                self.assertEqual('', self.reason(lambda *args: answer))
            self.assertIn('HTTP 200, and not the JSON', log.output[0])

    def test_each_question_once(self):
        trait = 'CUSTOM_FPGA_INTEL'
        self.reason(self.taken, self.spec(
            {**SPECS, f'trait1:{trait}': 'required'}))
        self.assertEqual(3, len(set(self.urls)))
        self.assertEqual(3, len(self.urls), self.urls)
        del self.urls[:]

        def free_alone(url, version):
            answer = self.taken(url, version)
            if url.startswith('/resource_providers?'):
                return self.response(200, {'resource_providers': [
                    {'root_provider_uuid': 'uuid1'}]})
            return answer if url.count('resources') > 2 else self.response(
                200, {'allocation_requests': [{}]})
        self.assertIn('each of the 8 groups', self.reason(
            free_alone, self.spec({
                f'resources{n}:{FPGA}': '1' for n in range(1, 9)})))
        self.assertEqual(3, len(self.urls), self.urls)

    def in_turn(self, hosts, offering, query='resources=VCPU:1', more=(),
                zone=None):
        """(answer to the question for a free FPGA, in_tree of each question
        for candidates): so many hosts have one, and some offer it; more has
        hosts with another one."""
        asked = []

        def get(url):
            if url.startswith('/resource_providers?'):
                found = [*(f'host{n}' for n in range(hosts)), *more]
                if zone and 'MEMORY_MB' in url:
                    found = zone
                return self.response(200, {'resource_providers': [
                    {'root_provider_uuid': host} for host in found]})
            query = dict(parse.parse_qsl(url.partition('?')[2]))
            asked.append(query.get('in_tree1'))
            return self.response(200, {'allocation_requests': [{}] * (
                query.get('in_tree1', offering and offering[0])
                in offering)})
        with mock.patch.object(fault, '_sample', lambda hosts, n: hosts[:n]):
            return fault._ask(get, query, {
                '1': request.Group({FPGA: 1})}), asked

    def test_no_host_is_asked_where_nothing_is_free(self):
        self.assertEqual((Answer.NONE, []), self.in_turn(0, ()))

    def test_hosts_that_have_it_are_asked_first(self):
        hosts = [f'host{n}' for n in range(9)]
        for free, offering, answer, asked in (
                (2, hosts[1:2], Answer.FREE, hosts[:2]),
                # it is free where the server may not go
                (2, (), Answer.NONE, hosts[:2]),
                (9, hosts[:1], Answer.FREE, hosts[:1]),
                (9, hosts[8:], Answer.FREE, [*hosts[:4], None]),
                (9, (), Answer.NONE, [*hosts[:4], None])):
            with self.subTest(free=free, offering=offering):
                self.assertEqual((answer, asked),
                                 self.in_turn(free, offering))

    def test_hosts_with_more_are_asked_first(self):
        self.assertEqual((Answer.FREE, ['host7']), self.in_turn(
            9, ['host7'], more=['host7']))

    def test_no_host_outside_of_the_zone_is_asked(self):
        """Nor the whole cloud, which takes Placement seconds."""
        query = 'resources=VCPU:1&member_of=zone'
        for zone, offering, answer in (
                (['host8'], ['host8'], Answer.FREE),
                (['host8'], (), Answer.NONE)):
            self.assertEqual((answer, zone), self.in_turn(
                9, offering, query, zone=zone))
            candidates.ZONES = candidates.Zones()

    def test_host_that_the_operator_named(self):
        query = 'resources=VCPU:1&in_tree=host3'
        self.assertEqual((Answer.NONE, [None]), self.in_turn(9, (), query))

    def test_not_asked(self):
        malformed = {f'resources1:{FPGA}': 'one'}
        for spec in (self.spec({}), self.spec({'resources:VCPU': '2'}),
                     self.spec(malformed),
                     self.spec(hints={'_nova_check_type': ['rebuild']})):
            with self.subTest(spec.flavor.extra_specs):
                self.assertEqual('', self.reason(self.taken, spec))
        self.assertEqual([], self.urls)

    def test_refused_by_the_filter(self):
        spec = self.spec()
        self.begun.of(spec).refused = scheduling.Refusal.DRIVER
        self.assertIn('do not give any out now',
                      self.reason(self.taken, spec))
        self.assertEqual([], self.urls)

    def test_answers_that_say_nothing(self):
        def refuse(url, version):
            raise OSError('no route to host')
        for get in (refuse, lambda *args: None,
                    lambda *args: self.response(503, 'busy'),
                    lambda *args: self.response(200, {}),
                    lambda *args: self.response(400, 'Invalid query')):
            with self.assertLogs(fault.LOG.logger, 'WARNING') as log:
                self.assertEqual('', self.reason(get))
            self.assertEqual(1, len(log.output), log.output)

    def test_class_that_no_host_ever_had(self):
        def unknown(url, version):
            if FPGA in url:
                return self.response(400, f'Invalid resource class: '
                                          f'No such resource class {FPGA}.')
            return self.taken(url, version)
        self.assertIn('offers any FPGA: choose', self.reason(unknown))

    def test_no_answer(self):
        """Nova's error is not held up, and only some threads wait."""
        answered, came = threading.Event(), threading.Semaphore(0)
        waiting = []

        def hang(url, version):
            waiting.append(threading.current_thread())
            came.release()
            answered.wait()
            raise OSError('too late')
        before = fault._AT_ONCE._value
        with mock.patch.object(fault, 'LIMIT', 0.05), \
                self.assertLogs(fault.LOG.logger, 'WARNING'):
            for _ in range(before + 2):
                self.assertEqual('', self.reason(hang))
            for _ in range(before):
                came.acquire()
            # later ones found no room
            self.assertEqual(before, len(waiting))
            self.assertTrue(all(thread.daemon for thread in waiting))
            answered.set()
            for thread in waiting:
                thread.join()
        self.assertEqual(before, fault._AT_ONCE._value)
        self.assertEqual(TAKEN, self.reason(self.taken))
