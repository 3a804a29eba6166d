# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What Placement says of where functions are loaded and what is free."""

import threading
import time
import weakref

from oslo_log import log as logging

from nova_accel import conf
from nova_accel import exception
from nova_accel import naming
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

# Placement API versions: ?required= of resource providers is 1.18 (and
# ?in_tree=, ?resources= are older), ?associated= of traits is 1.6
_PROVIDERS_VERSION = '1.18'
_TRAITS_VERSION = '1.6'


class Functions:
    """Answers of Placement, trusted for [accel] function_cache_seconds.

    Shared by all threads of a scheduler.

    :param get: callable (url, version) that returns a response with
        status_code and json(), or None or False, or raises, when Placement
        cannot be reached: SchedulerReportClient.get of Nova.
    """

    def __init__(self, get):
        self._get = get
        self._lock = threading.Lock()
        #: key -> (time.monotonic() until which it is good, answer)
        self._answers = {}
        #: a request spec of Nova, of which every scheduling has its own
        self._schedulings = weakref.WeakKeyDictionary()
        self._silent = False

    def scheduling(self, spec):
        """What is known in the scheduling of one request.

        :param spec: nova.objects.RequestSpec; the same object asks again for
            each server of a multi-create, and gets the same Scheduling.
        """
        with self._lock:
            known = self._schedulings.get(spec)
            if known is None:
                known = Scheduling(self, _requests(spec))
                self._schedulings[spec] = known
            return known

    def cached(self, key, ask):
        """ask(), or what it said lately; None (no answer) is not kept."""
        with self._lock:
            until, answer = self._answers.get(key, (0, None))
        if time.monotonic() < until:
            return answer
        answer = ask()
        if answer is not None and CONF.accel.function_cache_seconds:
            now = time.monotonic()
            with self._lock:
                # users name the functions: forget those nobody asks for
                self._answers = {k: v for k, v in self._answers.items()
                                 if v[0] > now}
                self._answers[key] = (
                    now + CONF.accel.function_cache_seconds, answer)
        return answer

    def providers(self, query):
        """UUIDs of the resource providers that a query finds.

        :param query: after GET /resource_providers?
        :returns: frozenset of str, empty when Placement does not know the
            trait or class (400); None when there is no answer.
        """
        return self._ask(
            f'/resource_providers?{query}', _PROVIDERS_VERSION,
            lambda body: frozenset(
                p['uuid'] for p in body['resource_providers']))

    def function_traits(self):
        """The trait of each loaded function, one spelling of each; or None."""
        return self._ask(
            f'/traits?name=startswith:{naming.FUNCTION_PREFIX}'
            f'&associated=true', _TRAITS_VERSION,
            lambda body: frozenset(filter(_is_canonical, body['traits'])))

    def _ask(self, url, version, read):
        try:
            response = self._get(url, version)
            # a requests.Response is false for 400, which is an answer
            if response is None or response is False:
                raise ConnectionError('no connection')
            if response.status_code == 400:
                answer = frozenset()
            elif response.status_code == 200:
                answer = read(response.json())
            else:
                raise ConnectionError(f'HTTP {response.status_code}')
        # keystoneauth has some thirty, and none may fail a scheduling
        except Exception as error:
            if not self._silent:
                self._silent = True
                LOG.warning(
                    'Placement was asked for %(url)s and did not answer '
                    '(%(error)s): servers are scheduled without regard to '
                    'loaded functions until it does.',
                    {'url': url, 'error': error})
            return None
        self._silent = False
        return answer


def _requests(spec):
    if 'extra_specs' not in spec.flavor:
        # not loaded: Nova takes such a flavor for one without any
        return []
    try:
        return request.parse(spec.flavor.extra_specs)
    except exception.AcceleratorError as error:
        # nova-api refuses such flavors, so that this one came around it; the
        # compute host says the same to the user
        LOG.warning('The accelerators of the flavor are not regarded in '
                    'scheduling: %s', error)
        return []


def _is_canonical(trait):
    function = naming.function_of(trait)
    return function is not None and naming.function_trait(function) == trait


class Scheduling:
    """The same answers throughout one scheduling, each asked for once.

    Used by one thread. Where Placement did not answer once, it is not asked
    again in this scheduling.
    """

    def __init__(self, functions, requests):
        self._functions = functions
        self._said = {}
        self._dead = False
        #: list of request.AcceleratorRequest
        self.requests = requests
        #: (provider UUID, class, amount) that Placement has not got any more
        self.full = set()
        #: host UUID -> servers on it when its candidates were ordered last
        self.instances = {}

    def _once(self, key, ask):
        if key not in self._said:
            answer = None if self._dead else ask()
            self._dead = self._dead or answer is None
            self._said[key] = answer
        return self._said[key]

    def carriers(self, trait):
        """UUIDs of the providers with a trait: frozenset, None if unknown."""
        def ask():
            return self._functions.providers(f'required={trait}')
        return self._once(
            trait, lambda: self._functions.cached(trait, ask))

    def copies(self):
        """How many providers have the function that a provider has.

        :returns: dict of provider UUID -> int from 1 up, None if unknown; a
            provider that is not in it has no function.
        """
        def ask():
            traits = self._functions.cached(
                naming.FUNCTION_PREFIX, self._functions.function_traits)
            if traits is None:
                return None
            copies = {}
            for trait in sorted(traits):
                carriers = self.carriers(trait)
                if carriers is None:
                    return None
                copies.update(dict.fromkeys(carriers, len(carriers)))
            return copies
        return self._once(naming.FUNCTION_PREFIX, ask)

    def look_again(self, root, wanted):
        """Learn which providers of a host have room, after a claim there.

        :param root: UUID of the host's root provider.
        :param wanted: iterable of (provider UUID, class, amount).
        :returns: whether any of wanted has room; True when Placement does not
            answer.
        """
        wanted = set(wanted)
        self.full -= wanted
        for name, amount in sorted({(n, a) for _, n, a in wanted}):
            room = self._functions.providers(
                f'in_tree={root}&resources={name}:{amount}')
            if room is None:
                return True
            self.full |= {w for w in wanted
                          if w[1:] == (name, amount) and w[0] not in room}
        return bool(wanted - self.full)
