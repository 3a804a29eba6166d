# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Answers of libraries that are the same each time, kept for the process.

A third of the processor time of a functional test went into these. None changes
what is answered.

* Schemas are proven once, as ``tests/cheap_services.py`` says.
* Placement makes the aliases of its tables again for each statement, with all
  their columns, and reads the names of all traits and resource classes for each
  request. They are read again where one was made or deleted.
* oslo.policy asks with each check how many arguments the check takes, and looks
  whether a file of rules has changed. It reads that of Nova's fixture for each
  cloud.
* oslo.versionedobjects goes through the names of all fields to see whether one
  is set, and through all fields to see what has changed.
* Nova's API compares each extra spec with more patterns than Python keeps, and
  makes a class of validators for each schema of each request.
* Nova reads the metadata of a server by two queries around the one for the
  server, which SQLAlchemy composes again each time. They are in the same row
  here: for the few of a test that takes half as long.
* Requests to services of this process go through the text of HTTP:
  ``tests/cheap_requests.py``.
* Listeners of the RPC transport in memory look 20 times a second whether a
  message has come. They sleep until one does.
"""

import functools
import inspect
import re
import threading
import time
import types
import weakref

from oslo_messaging._drivers import impl_fake
from oslo_policy import _checks
from oslo_policy import policy
from oslo_versionedobjects import base as versioned
from placement import attribute_cache
from placement import db_api
from placement.objects import allocation
from placement.objects import allocation_candidate
from placement.objects import consumer
from placement.objects import inventory
from placement.objects import project
from placement.objects import research_context
from placement.objects import resource_provider
from placement.objects import trait
from placement.objects import user
import sqlalchemy
import sqlalchemy.orm

from tests import cheap_requests
from tests import cheap_services

#: those that make aliases
_PLACEMENT = (allocation, allocation_candidate, consumer, inventory, project,
              research_context, resource_provider, trait, user)
#: seconds after which a listener looks without having been told
LOOK = 1


def _alias_once(alias):
    """sqlalchemy.alias(), of tables that live as long as the process."""
    return functools.lru_cache(maxsize=None)(alias)


class _Names:
    """Those that Placement's caches have, each of one request."""

    FIELDS = '_id_cache', '_str_cache', '_all_cache'

    def __init__(self):
        #: engine -> class of cache -> (changes, its fields)
        self._known = weakref.WeakKeyDictionary()
        #: how often a trait or class was made, changed or deleted
        self._changes = 0

    def clearing(self, clear):
        """clear() of a cache: after a change, and when it is made."""
        @functools.wraps(clear)
        def cleared(cache):
            self._changes += hasattr(cache, '_id_cache')
            clear(cache)
        return cleared

    def refreshing(self, refresh):
        """_refresh_from_db() of a cache: where something is not found."""
        names = self

        @db_api.placement_context_manager.reader
        def refreshed(self, context):
            known = names._known.setdefault(context.session.get_bind(), {})
            kind, changes = type(self), names._changes
            if self._all_cache or known.get(kind, (None,))[0] != changes:
                refresh(self, context)
                known[kind] = changes, [getattr(self, field)
                                        for field in names.FIELDS]
            for field, value in zip(names.FIELDS, known[kind][1], strict=True):
                setattr(self, field, dict(value))
        return refreshed


def _arguments_once(getfullargspec):
    """inspect.getfullargspec(), of a method that belongs to a class."""
    known = {}

    @functools.wraps(getfullargspec)
    def of(method):
        function = method.__func__
        if function not in known:
            known[function] = getfullargspec(method)
        return known[function]
    return of


def _parsed_once(parse):
    """parse_file_contents() of oslo.policy."""
    parsed = functools.lru_cache(parse)

    @functools.wraps(parse)
    def once(data):
        return dict(parsed(data))
    return once


def _loaded_once(load):
    """load_rules() of oslo.policy's enforcer."""
    @functools.wraps(load)
    def loaded(enforcer, force_reload=False):
        # a test may have set other rules, in place of all
        if (force_reload or not enforcer.rules
                or len(enforcer.rules) < len(enforcer.registered_rules)):
            load(enforcer, force_reload)
    return loaded


def _validator_once(make):
    """The class of validators of Nova's API, each for one schema."""
    known = {}

    @functools.wraps(make)
    def made(schema, *args):
        # a schema that is kept keeps its id
        key = id(schema), args
        if key not in known:
            known[key] = schema, make(schema, *args)
        return known[key][1]
    return made


def _is_set(ask):
    """obj_attr_is_set() of an object."""
    @functools.wraps(ask)
    def is_set(self, name):
        if name in self.fields or name in self.obj_extra_fields:
            return hasattr(self, '_obj_' + name)
        # its own error
        return ask(self, name)
    return is_set


def _what_changed(self):
    """obj_what_changed() of an object."""
    changed = self._changed_fields & self.fields.keys()
    for attribute, value in list(vars(self).items()):
        if (isinstance(value, versioned.VersionedObject)
                and attribute.startswith('_obj_')
                and attribute[5:] in self.fields
                and value.obj_what_changed()):
            changed.add(attribute[5:])
    return changed


class _Post:
    """Messages of the RPC transport in memory are announced."""

    def __init__(self):
        self._sent = 0
        self._came = threading.Condition()
        self._seen = threading.local()

    def announcing(self, act):
        """A method after which listeners have something to see."""
        @functools.wraps(act)
        def announced(*args, **kwargs):
            act(*args, **kwargs)
            with self._came:
                self._sent += 1
                self._came.notify_all()
        return announced

    def sleep(self, _seconds):
        """Of a listener that saw nothing: until there is something new."""
        with self._came:
            # nothing came after its last sleep, so before it looked
            if vars(self._seen).get('sent') == self._sent:
                self._came.wait(LOOK)
            self._seen.sent = self._sent


@functools.cache
def placement() -> None:
    """Do so for Placement."""
    cheap_services.schemas()
    cheap_requests.install()
    tables = types.SimpleNamespace(**{
        **vars(sqlalchemy), 'alias': _alias_once(sqlalchemy.alias)})
    for module in _PLACEMENT:
        module.sa = tables
    names = _Names()
    cache = attribute_cache._AttributeCache
    cache.clear = names.clearing(cache.clear)
    cache._refresh_from_db = names.refreshing(cache._refresh_from_db)
    _checks.inspect = types.SimpleNamespace(
        getfullargspec=_arguments_once(inspect.getfullargspec))
    policy.parse_file_contents = _parsed_once(policy.parse_file_contents)
    policy.Enforcer.load_rules = _loaded_once(policy.Enforcer.load_rules)


@functools.cache
def nova() -> None:
    """Do so for Nova's services."""
    # not before Placement's alone are wanted
    from nova.api.validation import validators
    from nova.db.main import api as db_main
    re._MAXCACHE = 1 << 14
    versioned.VersionedObject.obj_attr_is_set = _is_set(
        versioned.VersionedObject.obj_attr_is_set)
    versioned.VersionedObject.obj_what_changed = _what_changed
    validators._SchemaValidator = _validator_once(validators._SchemaValidator)
    db_main.orm = types.SimpleNamespace(**{
        **vars(sqlalchemy.orm), 'subqueryload': sqlalchemy.orm.joinedload})
    post = _Post()
    impl_fake.time = types.SimpleNamespace(
        **{**vars(time), 'sleep': post.sleep})
    for owner, name in ((impl_fake.FakeExchange, 'deliver_message'),
                        (impl_fake.FakeListener, 'stop')):
        setattr(owner, name, post.announcing(getattr(owner, name)))
