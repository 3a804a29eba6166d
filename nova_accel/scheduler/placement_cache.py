# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Where functions are loaded and what is free, according to Placement."""

from collections.abc import Callable, Hashable, Iterable
import threading
import time
import typing
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

_Answer = typing.TypeVar('_Answer')


class PlacementCache:
    """Answers of Placement, kept for [accel] function_cache_seconds.

    Shared by all threads of a scheduler.

    :param get: callable (url, version) that returns a response with
        status_code and json(). It returns None or False, or raises, when
        Placement cannot be reached: SchedulerReportClient.get of Nova.
    """

    def __init__(self, get: Callable[[str, str], typing.Any]):
        self._get = get
        self._lock = threading.Lock()
        #: key -> (time.monotonic() at which it expires, answer)
        self._answers: dict[Hashable, tuple[float, typing.Any]] = {}
        #: nova.objects.RequestSpec -> Snapshot; Nova makes one for each
        #: request
        self._snapshots: weakref.WeakKeyDictionary[
            typing.Any, 'Snapshot'] = weakref.WeakKeyDictionary()
        self._silent = False

    def snapshot(self, spec) -> 'Snapshot':
        """Return the answers that the scheduling of one request works with.

        :param spec: nova.objects.RequestSpec. Nova passes the same object for
            each server of a multi-create, which therefore share a Snapshot.
        """
        with self._lock:
            snapshot = self._snapshots.get(spec)
            if snapshot is None:
                snapshot = Snapshot(self, _requests(spec))
                self._snapshots[spec] = snapshot
            return snapshot

    def cached(self, key: Hashable, ask: Callable[[], _Answer | None],
               ) -> _Answer | None:
        """Return a recent answer of ask(), or ask again.

        None means no answer and is not kept.
        """
        with self._lock:
            until, answer = self._answers.get(key, (0, None))
        if time.monotonic() < until:
            return answer
        answer = ask()
        if answer is not None and CONF.accel.function_cache_seconds:
            now = time.monotonic()
            with self._lock:
                # users choose the keys: drop expired ones, or they pile up
                self._answers = {k: v for k, v in self._answers.items()
                                 if v[0] > now}
                self._answers[key] = (
                    now + CONF.accel.function_cache_seconds, answer)
        return answer

    def providers(self, query: str) -> frozenset[str] | None:
        """Return the UUIDs of the resource providers that a query finds.

        :param query: the part after GET /resource_providers?
        :returns: empty if Placement does not know the trait or class (400);
            None without an answer.
        """
        return self._ask(
            f'/resource_providers?{query}', _PROVIDERS_VERSION,
            lambda body: frozenset(
                p['uuid'] for p in body['resource_providers']))

    def function_traits(self) -> frozenset[str] | None:
        """Return one trait per loaded function; None without an answer."""
        return self._ask(
            f'/traits?name=startswith:{naming.FUNCTION_PREFIX}'
            f'&associated=true', _TRAITS_VERSION,
            lambda body: frozenset(filter(_is_canonical, body['traits'])))

    def _ask(self, url: str, version: str,
             read: Callable[[dict], frozenset[str]]) -> frozenset[str] | None:
        try:
            response = self._get(url, version)
            # a requests.Response is false for 400, which is an answer
            if response is None or response is False:
                raise ConnectionError('no connection')
            if response.status_code == 400:
                answer: frozenset[str] = frozenset()
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


def _requests(spec) -> list[request.AcceleratorRequest]:
    if 'extra_specs' not in spec.flavor:
        # not loaded: Nova treats such a flavor as one without extra specs
        return []
    try:
        return request.parse(spec.flavor.extra_specs)
    except exception.AcceleratorError as error:
        # nova-api refuses such flavors, so this one bypassed it; the compute
        # host reports the same error to the user
        LOG.warning('The accelerators of the flavor are ignored in '
                    'scheduling: %s', error)
        return []


def _is_canonical(trait: str) -> bool:
    function = naming.function_of(trait)
    return function is not None and naming.function_trait(function) == trait


class Snapshot:
    """Answers of Placement that stay the same throughout one scheduling.

    Each is asked for once. After one request without an answer Placement is
    not asked again in this scheduling. Used by one thread.
    """

    def __init__(self, cache: PlacementCache,
                 requests: list[request.AcceleratorRequest]):
        self._cache = cache
        self._answers: dict[Hashable, typing.Any] = {}
        self._dead = False
        self.requests = requests
        #: (provider UUID, class, amount) that are allocated by now
        self.full: set[tuple[str, str, int]] = set()
        #: host UUID -> servers on it when its candidates were ordered last
        self.instances: dict[str, int] = {}

    def _once(self, key: Hashable, ask: Callable[[], _Answer | None],
              ) -> _Answer | None:
        if key not in self._answers:
            answer = None if self._dead else ask()
            self._dead = self._dead or answer is None
            self._answers[key] = answer
        return self._answers[key]

    def carriers(self, trait: str) -> frozenset[str] | None:
        """Return the UUIDs of the providers with a trait; None if unknown."""
        def ask():
            return self._cache.providers(f'required={trait}')
        return self._once(trait, lambda: self._cache.cached(trait, ask))

    def copies(self) -> dict[str, int] | None:
        """Count the providers that have the same function as a provider.

        :returns: provider UUID -> 1 or more; providers without a function are
            left out. None if unknown.
        """
        def ask():
            traits = self._cache.cached(
                naming.FUNCTION_PREFIX, self._cache.function_traits)
            if traits is None:
                return None
            copies: dict[str, int] = {}
            for trait in sorted(traits):
                carriers = self.carriers(trait)
                if carriers is None:
                    return None
                copies.update(dict.fromkeys(carriers, len(carriers)))
            return copies
        return self._once(naming.FUNCTION_PREFIX, ask)

    def refresh_room(self, root: str,
                     wanted: Iterable[tuple[str, str, int]]) -> bool:
        """Ask which providers of a host have room, after a claim there.

        :param root: UUID of the host's root provider.
        :param wanted: (provider UUID, class, amount).
        :returns: whether any of wanted has room; True without an answer.
        """
        wanted = set(wanted)
        self.full -= wanted
        for name, amount in sorted({(n, a) for _, n, a in wanted}):
            room = self._cache.providers(
                f'in_tree={root}&resources={name}:{amount}')
            if room is None:
                return True
            self.full |= {w for w in wanted
                          if w[1:] == (name, amount) and w[0] not in room}
        return bool(wanted - self.full)
