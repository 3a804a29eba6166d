# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstreams in Glance: find, download, verify.

A bitstream is an image with one or more of the properties below, which its
owner sets. They have the names of the extra specs of flavors;
``accel:function_id`` is also Cyborg's spelling. Write UUIDs like uuidgen, in
lower case with dashes; spellings without dashes and in upper case are found,
too. (Glance compares properties only for equality: its ``in:`` works for
built-in attributes only.)

Every client here is a glanceclient (version 2) created with a session. Its
token may belong to the user, to an administrator who moves the server, or to
nova-compute itself, and the last two can see the images of all projects.
Therefore an image counts only if the project of the *server* may use it, or if
it is the operator's, whatever the token.

Each request has a limit of its own (bitstream.transport); the session's limit
does not apply.
"""

from collections.abc import (
    Callable, Generator, Iterator, Mapping, Sequence)
import contextlib
import dataclasses
import hashlib
import re
import time
import typing
from urllib import parse
import uuid

from glanceclient.v2 import client as glance_client
from keystoneauth1 import exceptions as ks_exc
from keystoneauth1 import loading as ks_loading

from nova_accel.bitstream import transport
from nova_accel import conf
from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel import request as accel_request
from nova_accel import text

CONF = conf.CONF

_URL = re.compile(r'https?://[^\s\'")]+')
#: path at which Keystone (API v3) issues tokens
_TOKENS = '/auth/tokens'

#: UUID of the function in the bitstream (DFL: afu_id)
FUNCTION_ID = 'accel:function_id'
#: name of the function; any string that can become a trait
FUNCTION_NAME = 'accel:function_name'
#: UUID of the type of region that the bitstream fits (DFL: compat_id)
REGION_TYPE_ID = 'accel:region_type_id'

#: property of the operator's images that clear a region after a server: what
#: they clear beside the region's function, 'memory' of the card or 'registers'
CLEARS = 'accel:clears'
#: what an image may clear, by precedence
CLEARED = ('memory', 'registers')

#: required keys of the entry of an image, and of a member of an image
_ENTRY, _MEMBER = {'id', 'status'}, {'member_id', 'status'}
#: maximum number of entries of one list; more are an error
_MOST = 1000
#: maximum number of images that other projects share with a project: each costs
#: an additional request
_MOST_SHARED = 50


@dataclasses.dataclass(frozen=True)
class Image:
    """The part of Glance's entry of an active image that this module uses."""

    id: str
    name: str
    #: in bytes; None if Glance does not report it
    size: int | None
    #: '<algorithm>-<hex digest>' of the data, from the entry
    content: str
    #: the whole entry, properties included
    entry: Mapping[str, typing.Any]

    def __str__(self) -> str:
        return f'image {self.id} ({text.printable(self.name)})'


def find(client, request: accel_request.AcceleratorRequest,
         region_type: str | None, project_id: str, operators=None,
         ) -> tuple[typing.Any, Image]:
    """Find the image that a request names and that fits a type of region.

    An image fits if its REGION_TYPE_ID is this type, or if it has none. If the
    request names a function, images of the operator take precedence. Other
    images count only if the flavor lets its users choose the bitstream: first
    images of the server's project, then images that other projects share and
    this project has accepted.

    :param request: a request with an image, a function or a function's name.
    :param region_type: UUID in the form of model.uuid_hex.
    :param operators: a client that can see the operator's images if ``client``
        cannot. Only images of the operator are taken from it.
    :returns: the client with which to fetch the image, and the image.
    :raises BitstreamError: no image matches, several match, or the image
        cannot be used on any host.
    :raises IncompatibleBitstream: all images that match are for other types of
        region.
    :raises GlanceUnavailable: Glance did not answer.
    """
    if request.bitstream_id:
        client, entry = _by_id(
            client, request.bitstream_id, project_id, operators,
            request.chosen_by_owner)
        if entry['status'] != 'active':
            raise exception.BitstreamError(
                f'{_named([entry])} was asked for as a bitstream, and its '
                f'status in Glance is {entry["status"]}: upload its data, or '
                f'reactivate it.')
        if not _fits(entry, region_type):
            raise _incompatible([entry], region_type)
        return client, _image(entry)

    if request.function_id:
        key, wanted = FUNCTION_ID, str(uuid.UUID(request.function_id))
        spellings = _spellings(request.function_id)
    else:
        key, wanted = FUNCTION_NAME, request.function_name or ''
        spellings = [wanted]
    seen: list[dict] = []
    for source, entries in _in_order(
            client, key, spellings, project_id, operators,
            request.runtime_programming):
        seen += entries
        fitting = [r for r in entries
                   if r['status'] == 'active' and _fits(r, region_type)]
        if len(fitting) == 1:
            return source, _image(fitting[0])
        if fitting:
            raise exception.BitstreamError(
                f'{_named(fitting)} have {key}={text.printable(wanted)}, and '
                f'the request needs one image: keep one, or name it with '
                f'accel:bitstream_id.')
    active = [r for r in seen if r['status'] == 'active']
    if active:
        raise _incompatible(active, region_type)
    if seen:
        raise exception.BitstreamError(
            f'{_named(seen)} have {key}={text.printable(wanted)}, and '
            f'none is active: upload data, or reactivate one.')
    if not request.runtime_programming:
        raise exception.BitstreamError(
            f'No image of the operator has {key}={text.printable(wanted)}, and '
            f'the flavor does not allow one of your own: tell the operator, or '
            f'take a flavor with {accel_request.RUNTIME}=true.')
    raise exception.BitstreamError(
        f'No image with {key}={text.printable(wanted)} may be used by the '
        f'project of the server: upload the bitstream with that property, or '
        f'share it with the project.')


def find_first(wanted: accel_request.AcceleratorRequest,
               find_one: Callable[[accel_request.AcceleratorRequest],
                                  tuple[typing.Any, Image]],
               ) -> tuple[accel_request.AcceleratorRequest, typing.Any, Image]:
    """Go through the choices of a request in order, and find the image of the
    first choice that has one.

    :param find_one: function that calls find() for one choice.
    :returns: the choice, and the result of find_one.
    :raises IncompatibleBitstream: no choice has an image for the region, but
        one has an image for another type of region.
    :raises BitstreamError: no choice has an image.
    """
    errors = []
    for choice in wanted.choices:
        try:
            return (choice, *find_one(choice))
        except (exception.BitstreamError,
                exception.IncompatibleBitstream) as error:
            errors.append(error)
    # prefer an error that another host may not have
    raise max(errors, key=lambda error: error.elsewhere)


def _by_id(client, image_id, project_id, operators, chosen_by_owner):
    """Return (client, entry) of an image that the project may use.

    :param chosen_by_owner: whether the owner of the server named the image. If
        not, an image with visibility "community" is refused.
    """
    if operators is not None:
        with contextlib.suppress(exception.ImageNotFound):
            entry = _entry(operators, image_id)
            if origin(entry) == model.OPERATOR:
                return operators, entry
    entry = _entry(client, image_id)
    if not (_may_use(client, entry, project_id) or chosen_by_owner
            and entry.get('visibility') == 'community'):
        raise _invisible(image_id)
    return client, entry


def find_operators(client, image_id: str) -> Image:
    """Find an image of the operator.

    :param client: a client with the credentials of nova-compute itself.
    :raises BitstreamError: the image does not exist, has no data, or now
        belongs to a project.
    :raises GlanceUnavailable: Glance did not answer.
    """
    entry = _entry(client, image_id)
    if entry['status'] != 'active' or origin(entry) != model.OPERATOR:
        raise exception.BitstreamError(
            f'{_named([entry])} cannot be programmed for the operator, '
            f'because it is {entry["status"]} and '
            f'{entry.get("visibility")}: make it public, or add its '
            f'project to [accel] bitstream_owners.')
    return _image(entry)


def find_ordered(client, name: str, region_type: str | None) -> Image:
    """Find the image of the operator that an order names.

    :param client: a client with the credentials of nova-compute itself.
    :param name: id of an image, or id or name of the function in it.
    :param region_type: UUID in the form of model.uuid_hex.
    :raises BitstreamError: no image fits, several fit, or the images that fit
        are not the operator's.
    :raises IncompatibleBitstream: the image is for another type of region.
    :raises GlanceUnavailable: Glance did not answer.
    """
    try:
        hexadecimal = model.uuid_hex(name)
    except ValueError:
        key, spellings = FUNCTION_NAME, [name] if name else []
    else:
        with contextlib.suppress(exception.ImageNotFound):
            image = find_operators(client, str(uuid.UUID(hexadecimal)))
            if not _fits(image.entry, region_type):
                raise _incompatible([image.entry], region_type)
            return image
        key, spellings = FUNCTION_ID, _spellings(hexadecimal)
    found = _of_operators(client, key, spellings)
    usable = [r for r in found if r['status'] == 'active']
    fitting = [r for r in usable if _fits(r, region_type)]
    if len(fitting) == 1:
        return _image(fitting[0])
    if fitting:
        raise exception.BitstreamError(
            f'{_named(fitting)} have {key}={text.printable(name)}, and one '
            f'has to be programmed: name it by its id.')
    if usable:
        raise _incompatible(usable, region_type)
    found += _with(client, key, spellings, _MOST_SHARED)
    if found:
        raise exception.BitstreamError(
            f'{text.printable(name)} cannot be programmed for the operator, '
            f'because {_named([*found])} with it is not active or not the '
            f'operator\'s: make it public, or add its project to [accel] '
            f'bitstream_owners.')
    raise exception.ImageNotFound(
        f'{text.printable(name)} cannot be programmed, because it is neither '
        f'the id of an image nor the {FUNCTION_ID} or {FUNCTION_NAME} of one: '
        f'upload the image, or correct the name.')


def find_clearing(client, region_type: str | None,
                  cleared: Sequence[str] = CLEARED) -> Image:
    """Find the operator's image that clears regions of a type.

    Images that clear the memory of the card take precedence. Among equal
    images, the image with the lowest id does.

    :param client: a client with the credentials of nova-compute itself.
    :param region_type: UUID in the form of model.uuid_hex.
    :param cleared: the kinds of CLEARED that are permitted.
    :raises ImageNotFound: no image clears such regions.
    :raises BitstreamError: the preferred image is not active. No other image
        replaces it, because another one might clear less.
    :raises GlanceUnavailable: Glance did not answer.
    """
    for what in cleared if region_type else ():
        entries = [
            r for r in _of_operators(client, CLEARS, [what])
            if _hex(r.get(REGION_TYPE_ID) or '') == region_type]
        active = [r for r in entries if r['status'] == 'active']
        if active:
            return _image(min(active, key=lambda r: r['id']))
        if entries:
            raise exception.BitstreamError(
                f'{_named(entries[:1])} must clear regions of type '
                f'{uuid.UUID(region_type)}, and its status in Glance is '
                f'{entries[0]["status"]}: reactivate it, upload another one, '
                f'or delete it if no region must be cleared so.')
    raise exception.ImageNotFound(
        f'An image that clears regions of type '
        f'{uuid.UUID(region_type) if region_type else "unknown"} was looked '
        f'for, and no image of the operator has {CLEARS}=memory or '
        f'{CLEARS}=registers and this type as {REGION_TYPE_ID}: upload one, '
        f'or choose another policy in [accel] handover.')


def _in_order(client, key, spellings, project_id, operators, of_projects):
    """Yield (client, entries of images): first the operator's images, then
    images of the server's project, then images that it has accepted from other
    projects. Glance is asked only when the caller needs the entries.

    :param of_projects: whether images of projects are permitted.
    """
    yield operators or client, _of_operators(
        operators or client, key, spellings)
    if not of_projects:
        return
    yield client, [r for r in _with(client, key, spellings, owner=project_id)
                   if origin(r) != model.OPERATOR]
    yield client, [
        r for r in _with(client, key, spellings, _MOST_SHARED,
                         visibility='shared')
        if origin(r) != model.OPERATOR and r.get('owner') != project_id
        and _may_use(client, r, project_id)]


def _spellings(function_id: str) -> list[str]:
    dashed = str(uuid.UUID(function_id))
    return [dashed, function_id, dashed.upper(), function_id.upper()]


def _of_operators(client, key, spellings) -> list[dict]:
    """Return the entries of the operator's images.

    The queries select public images, and images of each bitstream owner. Hence
    the number of requests does not depend on the images of other projects,
    which may be many.
    """
    found = {r['id']: r for more in (
        {'visibility': 'public'},
        *({'owner': owner} for owner in CONF.accel.bitstream_owners))
        for r in _with(client, key, spellings, **more)}
    return [r for r in found.values() if origin(r) == model.OPERATOR]


def _with(client, key, spellings, most=None, **more):
    return {r['id']: r for value in spellings
            for r in listed(client, {key: value, **more}, most)}.values()


def origin(entry: Mapping[str, typing.Any]) -> str | None:
    """Return who is responsible for an image.

    :param entry: Glance's entry of the image.
    :returns: model.OPERATOR for a public image and for images of [accel]
        bitstream_owners, else the owning project, or None without an owner.
    """
    owner = entry.get('owner')
    if (entry.get('visibility') == 'public'
            or owner in CONF.accel.bitstream_owners):
        return model.OPERATOR
    return owner or None


def _may_use(client, entry, project_id) -> bool:
    """Return whether the servers of a project may use an image. They must not
    use community images, because any project can create them."""
    if (entry.get('owner') == project_id
            or entry.get('visibility') == 'public'):
        return True
    if entry.get('visibility') != 'shared':
        return False
    body = transport.get_json(
        client, f'/v2/images/{entry["id"]}/members',
        f'the members of image {entry["id"]}', lambda body: (
            _are(body.get('members'), _MEMBER.issubset)))
    return any(m['member_id'] == project_id and m['status'] == 'accepted'
               for m in body['members'])


def _invisible(image_id) -> exception.ImageNotFound:
    # the same text as for a missing image, to hide that the image exists
    return exception.ImageNotFound(
        f'Glance was asked for image {image_id}, which does not '
        f'exist or is not visible to the project of the server: correct the '
        f'image id, or share the image with the project.')


def service_client():
    """Return a client with the credentials of nova-compute itself, for work
    without a user, and for the operator's images.

    Nova registers the options that are used: the credentials of
    [service_user], the session of [glance], and the first of its api_servers.

    :raises NoCredentials: [service_user] has none.
    :raises GlanceUnavailable: Keystone rejects them, or cannot be reached.
    """
    try:
        return _service_client()
    except ks_exc.ClientException as error:
        where = unreachable(error)
        if where.startswith('Keystone'):
            raise exception.GlanceUnavailable(
                f'Glance was asked for a bitstream, and {where} cannot be '
                f'reached: correct [service_user] auth_url in nova.conf of '
                f'this host, or see that Keystone runs.') from None
        raise exception.GlanceUnavailable(
            f'Glance was asked for a bitstream, and Keystone rejects the '
            f'credentials of [service_user] in nova.conf of this host '
            f'({transport.reason(error)}): correct them.') from None


def _service_client():
    auth = ks_loading.load_auth_from_conf_options(CONF, 'service_user')
    if auth is None:
        raise exception.NoCredentials(
            'A bitstream has to be fetched by nova-compute itself, and '
            '[service_user] of nova.conf has no credentials: set them on this '
            'host.')
    session = ks_loading.load_session_from_conf_options(CONF, 'glance')
    if servers := CONF.glance.api_servers:
        endpoint = servers[0]
    else:
        endpoint = session.get_endpoint(
            auth, service_type='image', region_name=CONF.glance.region_name,
            interface=CONF.glance.valid_interfaces)
        endpoint = without_version(endpoint or '')
    return glance_client.Client(
        session=session, auth=auth, endpoint_override=endpoint)


def without_version(endpoint: str) -> str:
    """Return an endpoint of the catalog without the version of the API, which
    glanceclient adds."""
    return re.sub(r'/v[0-9.]+/?$', '/', endpoint)


def check_use(client, image_id: str, project_id: str) -> None:
    """Check that the servers of a project may use an image that their owner
    names.

    :param client: has the credentials of nova-compute, to see every image.
    :raises BitstreamError: the image does not exist, or the project may not
        use it: the image is neither public nor a community image, and the
        project neither owns nor has accepted it.
    """
    try:
        image_id = str(uuid.UUID(image_id))
    except ValueError:
        raise exception.BitstreamError(
            f'{text.printable(image_id)} is not the id of an image: give a '
            f'UUID.') from None
    _by_id(client, image_id, project_id, None, chosen_by_owner=True)


def unreachable(error: BaseException) -> str:
    """Return the service that an error of keystoneauth could not reach.

    :returns: 'Keystone at <URL>', or the URL of another service, or '' for
        other errors.
    """
    inner: BaseException | None = error
    while not isinstance(inner, (ks_exc.ConnectFailure, ks_exc.ConnectTimeout,
                                 ks_exc.DiscoveryFailure)):
        if inner is None:
            return ''
        inner = inner.__context__
    found = _URL.search(str(inner))
    url = found[0].rstrip(':.,') if found else ''
    if isinstance(inner, ks_exc.DiscoveryFailure) or _TOKENS in url:
        return f'Keystone at {url}' if url else 'Keystone'
    return url or 'it'


def rejects_credentials(error: BaseException) -> bool:
    """Return whether an error means that Keystone refused to issue a token."""
    return (isinstance(error, ks_exc.Unauthorized)
            and _TOKENS in (error.url or ''))


def by_name_or_id(client, name_or_id: str) -> list[dict]:
    """Return the entry of the image with this id, or of images with this name.

    :raises BitstreamError: Glance refused the request.
    :raises GlanceUnavailable: Glance did not answer.
    """
    try:
        return [_entry(client, str(uuid.UUID(name_or_id)))]
    except (ValueError, exception.ImageNotFound):
        return list(listed(client, {'name': name_or_id}))


def function_id(image: Image) -> str | None:
    """Return the function of an image in the form of model.uuid_hex, or None
    if its entry has none."""
    return _hex(image.entry.get(FUNCTION_ID) or '') or None


def function_name(image: Image) -> str | None:
    """Return the name of the function in the image, or None."""
    return image.entry.get(FUNCTION_NAME) or None


def verify(bitstream: model.Bitstream, function: str | None, image: Image,
           region: model.Region) -> None:
    """Check that the file has the requested function and fits the region.

    Call this before programming: the kernel checks neither. A file without a
    function UUID (legacy GBS) passes; its function is read back after
    programming.

    :param function: UUID of the requested function in the form of
        model.uuid_hex; None: any.
    :raises IncompatibleBitstream: the file is for another type of region.
    :raises BitstreamError: the file has another function, or contradicts the
        properties of its image.
    """
    if not region.region_type_uuid:
        raise exception.IncompatibleBitstream(
            f'{image} cannot be programmed because {region.name} does not '
            f'report its region type: use a device whose driver reports it.')
    if bitstream.region_type_uuid != region.region_type_uuid:
        raise exception.IncompatibleBitstream(
            f'{image} is for regions of type '
            f'{uuid.UUID(bitstream.region_type_uuid)}, which '
            # second part, because a fault is shortened in its middle
            f'{region.name} is not: upload a bitstream for type '
            f'{uuid.UUID(region.region_type_uuid)}.')
    for key, found in ((REGION_TYPE_ID, bitstream.region_type_uuid),
                       (FUNCTION_ID, bitstream.function_uuid)):
        value = image.entry.get(key)
        if value and found and _hex(value) != found:
            raise exception.BitstreamError(
                f'{image} has the property {key}={text.printable(value)}, and '
                f'its file has {uuid.UUID(found)}: correct the property, or '
                f'upload the right file.')
    if (function and bitstream.function_uuid
            and bitstream.function_uuid != function):
        raise exception.BitstreamError(
            f'{image} was found for function '
            f'{uuid.UUID(function)}, and its file has '
            f'{uuid.UUID(bitstream.function_uuid)}: upload the right file.')
    title = function_name(image)
    if title:
        try:
            naming.function_name_trait(title)
        except exception.InvalidName:
            raise exception.BitstreamError(
                f'{image} has the property {FUNCTION_NAME}='
                f'{text.printable(title)}, which cannot become a trait: use '
                f'letters, digits, "-", "_" and spaces.') from None


def download_seconds() -> int:
    """Return the maximum duration of the download of an image, in seconds."""
    return 10 * CONF.accel.glance_timeout


def head(client, image: Image) -> bytes:
    """Return the first chunk, up to 1 MiB, of an image's data, without
    verification.

    :raises BitstreamError: Glance refused the request.
    :raises GlanceUnavailable: Glance did not answer, or stopped sending.
    """
    with contextlib.closing(_data(
            client, image, CONF.accel.glance_timeout)) as chunks:
        return next(chunks, b'')


def download(client, image: Image, file: typing.BinaryIO) -> None:
    """Write the data of an image into a file and verify size and hash.

    Memory use is bounded by glanceclient's chunks of 1 MiB.

    :raises BitstreamError: the data are too large, or differ from the entry.
    :raises GlanceUnavailable: Glance did not answer, stopped sending, or
        did not end within download_seconds().
    :raises OSError: the file could not be written.
    """
    limit = CONF.accel.bitstream_max_size << 20
    if (image.size or 0) > limit:
        raise _too_large(image, image.size)
    algorithm, _, digest = image.content.partition('-')
    hasher = hashlib.new(algorithm, usedforsecurity=False)
    received = 0
    for chunk in _data(client, image, download_seconds()):
        received += len(chunk)
        if received > limit:
            raise _too_large(image, received)
        hasher.update(chunk)
        file.write(chunk)
        # let other green threads run, even if data arrives without a pause
        time.sleep(0)
    if image.size is not None and received != image.size:
        raise exception.BitstreamError(
            f'{image} has {image.size} bytes according to Glance, and '
            f'Glance sent {received}: upload the bitstream again.')
    if hasher.hexdigest() != digest:
        raise exception.BitstreamError(
            f'{image} has the {algorithm} {digest[:16]}... according to '
            f'Glance, and its data have {hasher.hexdigest()[:16]}...: upload '
            f'the bitstream again.')


# Entries

def _image(entry) -> Image:
    algorithm, digest = entry.get('os_hash_algo'), entry.get('os_hash_value')
    if not digest:
        algorithm, digest = 'md5', entry.get('checksum')
    if not digest:
        raise exception.BitstreamError(
            f'{_named([entry])} cannot be verified, because Glance has no '
            f'checksum of it: upload it again.')
    try:
        length = 2 * hashlib.new(algorithm, usedforsecurity=False).digest_size
    except (TypeError, ValueError):
        length = 0
    # the digest becomes a file name in the cache
    if not length or not re.fullmatch(f'[0-9a-f]{{{length}}}', digest):
        raise exception.BitstreamError(
            f'{_named([entry])} has the {text.printable(algorithm)} '
            f'{text.printable(digest)} in Glance, which this host cannot '
            f'verify: use another hashing_algorithm in glance-api.conf.')
    return Image(id=entry['id'], name=entry.get('name') or '',
                 size=entry.get('size'), content=f'{algorithm}-{digest}',
                 entry=entry)


def _hex(value) -> str:
    """Return a UUID in the form of model.uuid_hex; other values unchanged."""
    try:
        return model.uuid_hex(value)
    except ValueError:
        return value


def _fits(entry, region_type) -> bool:
    value = entry.get(REGION_TYPE_ID)
    return not value or _hex(value) == region_type


def _incompatible(entries, region_type) -> exception.IncompatibleBitstream:
    types = ', '.join(sorted(
        {text.printable(r[REGION_TYPE_ID]) for r in entries}))
    region = uuid.UUID(region_type) if region_type else 'unknown'
    return exception.IncompatibleBitstream(
        f'{_named(entries)} has the {REGION_TYPE_ID} {types}, and the '
        f'allocated region has type {region}: upload one for that type.')


def _too_large(image, size) -> exception.BitstreamError:
    return exception.BitstreamError(
        f'{image} has {size} bytes or more, and [accel] bitstream_max_size '
        f'allows {CONF.accel.bitstream_max_size} MiB: use another image, or '
        f'raise the limit.')


def _named(entries) -> str:
    """Return a text that names images and fits into a fault, which has at most
    255 characters."""
    if len(entries) == 1:
        entry, = entries
        return f'Image {entry["id"]} ({text.printable(entry.get("name"))})'
    return f'Images {text.some([entry["id"] for entry in entries])}'


# Requests

def _entry(client, image_id) -> dict:
    return transport.get_json(
        client, f'/v2/images/{image_id}', f'image {image_id}', _is_entry)


def _is_entry(found) -> bool:
    return _ENTRY <= found.keys()


def _are(found, is_valid) -> bool:
    """Return whether a value is a list of objects that are all valid."""
    return isinstance(found, list) and all(
        isinstance(one, dict) and is_valid(one) for one in found)


def listed(client, filters: Mapping[str, str],
           most: int | None = None) -> Iterator[dict]:
    """Yield the entries of the images whose properties have these values.

    :param most: the number of images after which to stop. None: do not stop,
        and raise an error for more than _MOST images.
    :raises BitstreamError: Glance refused the request.
    :raises GlanceUnavailable: Glance did not answer.
    """
    # Glance filters by the first value; _may_use() checks the owner
    key, value = next(iter(filters.items()))
    what = f'the images with {key}={text.printable(value)}'
    path: str | None = '/v2/images?' + parse.urlencode(filters)
    end = time.monotonic() + download_seconds()
    seen = 0
    while path:
        page = transport.get_json(client, path, what, lambda page: (
            _are(page.get('images'), _is_entry)))
        for entry in page['images']:
            yield entry
            seen += 1
            if seen == most:
                return
        if seen > _MOST:
            raise exception.BitstreamError(
                f'Glance was asked for {what}, and has more than {_MOST}: '
                f'delete those that are not needed, or name the image by its '
                f'id.')
        path = page.get('next')
        # Glance returns "next" only with full pages (api/v2/images.py)
        if path and (not page['images'] or time.monotonic() > end):
            raise exception.GlanceUnavailable(
                f'Glance at {transport.where(client)} was asked for {what}, '
                f'and its list has no end: check it, and the proxy in front '
                f'of it.')


def _data(client, image, seconds) -> Generator[bytes, None, None]:
    return transport.get_data(
        client, f'/v2/images/{image.id}/file', f'the data of {image}',
        image.size, seconds)
