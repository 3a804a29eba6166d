# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Bitstreams in Glance: find, download, verify.

A bitstream is an image whose owner sets, as far as they are wanted, the
properties below. They are spelled as the extra specs of flavors are, and
``accel:function_id`` as Cyborg spells it. UUIDs are best written as uuidgen
writes them, in lower case with dashes; the spellings without dashes and in
upper case are found too. (Glance compares properties only for equality: its
``in:`` is for built-in attributes alone.)

Every client here is a glanceclient (version 2) that was made with a session;
it carries the token of the user for whom we ask, so that what the user may not
see is not found. The time limit of each request, [accel] glance_timeout, is
ours and not the session's.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import hashlib
import re
import time
import typing
from urllib import parse
import uuid

from glanceclient import exc as glance_exc
from glanceclient.v2 import client as glance_client
from keystoneauth1 import exceptions as ks_exc
from keystoneauth1 import loading as ks_loading
import requests

from nova_accel import conf
from nova_accel import exception
from nova_accel import model
from nova_accel import naming
from nova_accel import request as accel_request

CONF = conf.CONF

#: the function that the bitstream brings (DFL: afu_id)
FUNCTION_ID = 'accel:function_id'
#: its name; any string that can become a trait
FUNCTION_NAME = 'accel:function_name'
#: the type of region that it fits (DFL: compat_id)
REGION_TYPE_ID = 'accel:region_type_id'

#: how many images an error names
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Image:
    """What we use of Glance's record of an active image."""

    id: str
    name: str
    #: bytes; None where Glance does not know
    size: int | None
    #: '<algorithm>-<hex digest>' of the data, by Glance
    content: str
    #: the whole record, properties included
    record: Mapping[str, typing.Any]

    def __str__(self) -> str:
        return f'image {self.id} ({_shown(self.name)})'


def find(client, request: accel_request.AcceleratorRequest,
         region_type: str | None) -> Image:
    """The one image that a request asks for and that fits a type of region.

    An image whose REGION_TYPE_ID is another type does not fit; one without
    that property may.

    :param request: one that programs.
    :param region_type: in the form of model.uuid_hex.
    :raises BitstreamError: there is none, there are several, or it cannot be
        used, on any host.
    :raises IncompatibleBitstream: there are some, for other types of region.
    :raises GlanceUnavailable: Glance did not answer.
    """
    if request.bitstream_id:
        record = _record(client, request.bitstream_id)
        if record['status'] != 'active':
            raise exception.BitstreamError(
                f'{_named([record])} was asked for as a bitstream, and its '
                f'status in Glance is {record["status"]}: upload its data, or '
                f'reactivate it.')
        if not _fits(record, region_type):
            raise _unfit([record], region_type)
        return _image(record)

    if request.function_id:
        key, wanted = FUNCTION_ID, str(uuid.UUID(request.function_id))
        plain = request.function_id
        spellings = [wanted, plain, wanted.upper(), plain.upper()]
    else:
        key, wanted = FUNCTION_NAME, request.function_name
        spellings = [wanted]
    records = {r['id']: r for value in spellings
               for r in _list(client, {key: value})}.values()
    active = [r for r in records if r['status'] == 'active']
    fitting = [r for r in active if _fits(r, region_type)]
    if len(fitting) == 1:
        return _image(fitting[0])
    if fitting:
        raise exception.BitstreamError(
            f'{_named(fitting)} have {key}={_shown(wanted)}: keep one, or '
            f'name it with accel:bitstream_id.')
    if active:
        raise _unfit(active, region_type)
    if records:
        raise exception.BitstreamError(
            f'{_named(records)} would have {key}={_shown(wanted)}, and none '
            f'is active: upload data, or reactivate one.')
    raise exception.BitstreamError(
        f'No image that the user can see has {key}={_shown(wanted)}: upload '
        f'the bitstream with that property, or share it with the project.')


def service_client(endpoint: str | None):
    """Glance for nova-compute itself, where no user is there to ask.

    With the credentials of [service_user] and the session of [glance], which
    Nova has registered.

    :param endpoint: without version; None takes the catalog's.
    :raises GlanceUnavailable: [service_user] has no credentials, or Keystone
        does not take them.
    """
    try:
        return _service_client(endpoint)
    except ks_exc.ClientException as error:
        raise exception.GlanceUnavailable(
            f'A bitstream is wanted, and the credentials of [service_user] '
            f'in nova.conf of this host do not open Glance '
            f'({_reason(error)}): correct them.') from None


def _service_client(endpoint):
    auth = ks_loading.load_auth_from_conf_options(CONF, 'service_user')
    if auth is None:
        raise exception.GlanceUnavailable(
            'A bitstream is wanted without a user to fetch it for, and '
            '[service_user] of nova.conf has no credentials: set them on this '
            'host.')
    session = ks_loading.load_session_from_conf_options(CONF, 'glance')
    if endpoint is None:
        endpoint = session.get_endpoint(
            auth, service_type='image', region_name=CONF.glance.region_name,
            interface=CONF.glance.valid_interfaces)
        endpoint = re.sub(r'/v[0-9.]+/?$', '/', endpoint or '')
    return glance_client.Client(
        session=session, auth=auth, endpoint_override=endpoint)


def check_use(client, image_id: str, project_id: str) -> None:
    """See that servers of a project may use an image that we can see.

    :param client: of the service, which may see everything.
    :raises BitstreamError: there is no such image, or it is not the
        project's own, nor public, nor shared with it.
    """
    try:
        image_id = str(uuid.UUID(image_id))
    except ValueError:
        raise exception.BitstreamError(
            f'{_shown(image_id)} is no id of an image: give a UUID.') from None
    record = _record(client, image_id)
    if record.get('owner') == project_id or record.get('visibility') in (
            'public', 'community'):
        return
    if record.get('visibility') == 'shared':
        _, body = _get(client, f'/v2/images/{image_id}/members',
                       f'the members of image {image_id}')
        if any(m['member_id'] == project_id and m['status'] == 'accepted'
               for m in body['members']):
            return
    # the same words as for an image that is not there
    raise exception.BitstreamError(
        f'Glance was asked for the record of image {image_id}, and there is '
        f'none or the project of the server cannot see it: correct the image '
        f'id, or share the image with the project.')


def function_name(image: Image) -> str | None:
    """The name of the function that the image brings, where it has one."""
    return image.record.get(FUNCTION_NAME) or None


def verify(bitstream: model.Bitstream,
           request: accel_request.AcceleratorRequest, image: Image,
           region: model.Region) -> None:
    """Check that the file is what was asked for and fits the region.

    The kernel checks neither, so that nothing may be programmed before. A
    file that does not tell its function (legacy GBS) passes here: what it
    brought is known when it is read back.

    :raises IncompatibleBitstream: it is for another type of region.
    :raises BitstreamError: it is another function, or not what the properties
        of its image say.
    """
    if not region.region_type_uuid:
        raise exception.IncompatibleBitstream(
            f'{image} cannot be programmed, as {region.name} does not tell '
            f'which bitstreams fit: use a device whose driver reports it.')
    if bitstream.region_type_uuid != region.region_type_uuid:
        raise exception.IncompatibleBitstream(
            f'{image} is for regions of type {_dashed(bitstream)}, and '
            f'{region.name} is of type {uuid.UUID(region.region_type_uuid)}: '
            f'upload a bitstream for that type.')
    for key, found in ((REGION_TYPE_ID, bitstream.region_type_uuid),
                       (FUNCTION_ID, bitstream.function_uuid)):
        value = image.record.get(key)
        if value and found and _hex(value) != found:
            raise exception.BitstreamError(
                f'{image} has the property {key}={_shown(value)}, and its '
                f'file says {uuid.UUID(found)}: correct the property, or '
                f'upload the right file.')
    if (request.function_id and bitstream.function_uuid
            and bitstream.function_uuid != request.function_id):
        raise exception.BitstreamError(
            f'{image} was found for function '
            f'{uuid.UUID(request.function_id)}, and its file brings '
            f'{uuid.UUID(bitstream.function_uuid)}: upload the right file.')
    if function_name(image):
        try:
            naming.function_name_trait(function_name(image))
        except exception.InvalidName:
            raise exception.BitstreamError(
                f'{image} has the property {FUNCTION_NAME}='
                f'{_shown(function_name(image))}, which cannot become a '
                f'trait: use letters, digits, "-", "_" and spaces.') from None


def download(client, image: Image, file: typing.BinaryIO) -> None:
    """Write the data of an image into a file, verified by size and hash.

    Memory is bounded by glanceclient's chunks of 1 MiB.

    :raises BitstreamError: too large, or not what the record says.
    :raises GlanceUnavailable: Glance did not answer or broke off.
    :raises OSError: the file could not be written.
    """
    limit = CONF.accel.bitstream_max_size << 20
    if (image.size or 0) > limit:
        raise _too_large(image, image.size)
    algorithm, _, digest = image.content.partition('-')
    hasher = hashlib.new(algorithm, usedforsecurity=False)
    received = 0
    for chunk in _data(client, image):
        received += len(chunk)
        if received > limit:
            raise _too_large(image, received)
        hasher.update(chunk)
        file.write(chunk)
        # data that come fast would let no other green thread run
        time.sleep(0)
    if image.size is not None and received != image.size:
        raise exception.BitstreamError(
            f'{image} has {image.size} bytes by its record, and Glance sent '
            f'{received}: upload the bitstream again.')
    if hasher.hexdigest() != digest:
        raise exception.BitstreamError(
            f'{image} has the {algorithm} {digest[:16]}... by its record, and '
            f'its data have {hasher.hexdigest()[:16]}...: upload the '
            f'bitstream again.')


# Records

def _image(record) -> Image:
    algorithm, digest = record.get('os_hash_algo'), record.get('os_hash_value')
    if not digest:
        algorithm, digest = 'md5', record.get('checksum')
    if not digest:
        raise exception.BitstreamError(
            f'{_named([record])} has no checksum in Glance to verify its data '
            f'by: upload it again.')
    try:
        length = 2 * hashlib.new(algorithm, usedforsecurity=False).digest_size
    except (TypeError, ValueError):
        length = 0
    # the cache makes a file name of it
    if not length or not re.fullmatch(f'[0-9a-f]{{{length}}}', digest):
        raise exception.BitstreamError(
            f'{_named([record])} has the {_shown(algorithm)} '
            f'{_shown(digest)} in Glance, which this host cannot verify: use '
            f'another hashing_algorithm in glance-api.conf.')
    return Image(id=record['id'], name=record.get('name') or '',
                 size=record.get('size'), content=f'{algorithm}-{digest}',
                 record=record)


def _hex(value) -> str:
    """A UUID in the form of model.uuid_hex, anything else unchanged."""
    try:
        return model.uuid_hex(value)
    except ValueError:
        return value


def _fits(record, region_type) -> bool:
    value = record.get(REGION_TYPE_ID)
    return not value or _hex(value) == region_type


def _unfit(records, region_type) -> exception.IncompatibleBitstream:
    types = ', '.join(sorted({_shown(r[REGION_TYPE_ID]) for r in records}))
    region = uuid.UUID(region_type) if region_type else 'unknown'
    return exception.IncompatibleBitstream(
        f'{_named(records)} is for regions of type {types} by its '
        f'{REGION_TYPE_ID}, and the allocated region has type {region}: '
        f'upload one for that type.')


def _too_large(image, size) -> exception.BitstreamError:
    return exception.BitstreamError(
        f'{image} has {size} bytes or more, and [accel] bitstream_max_size '
        f'allows {CONF.accel.bitstream_max_size} MiB: use another image, or '
        f'raise the limit.')


def _dashed(bitstream) -> uuid.UUID:
    return uuid.UUID(bitstream.region_type_uuid)


def _named(records) -> str:
    """Short, as Nova cuts faults off after 255 characters."""
    if len(records) == 1:
        record, = records
        return f'Image {record["id"]} ({_shown(record.get("name"))})'
    ids = ', '.join(r['id'] for r in list(records)[:_NAMED])
    more = len(records) - _NAMED
    return f'Images {ids}' + f' and {more} more' * (more > 0)


def _shown(text) -> str:
    """A user's text as a part of an error: short and printable."""
    text = ascii(text or '')
    return text if len(text) <= 60 else text[:60] + "...'"


# Requests

def _record(client, image_id) -> dict:
    what = f'the record of image {image_id}'
    response, body = _get(client, f'/v2/images/{image_id}', what)
    if not isinstance(body, dict) or not {'id', 'status'} <= body.keys():
        raise _no_glance(client, what, response)
    return body


def _list(client, filters) -> Iterator[dict]:
    what = 'the images with ' + ', '.join(
        f'{k}={_shown(v)}' for k, v in filters.items())
    path = '/v2/images?' + parse.urlencode(filters)
    while path:
        response, body = _get(client, path, what)
        if not isinstance(body, dict) or 'images' not in body:
            raise _no_glance(client, what, response)
        yield from body['images']
        path = body.get('next')


def _data(client, image) -> Iterator[bytes]:
    what = f'the data of {image}'
    response, body = _get(client, f'/v2/images/{image.id}/file', what)
    received = 0
    with contextlib.closing(response):
        if response.status_code == requests.codes.no_content:
            raise exception.BitstreamError(
                f'{image} has a record in Glance and no data: upload the '
                f'bitstream again.')
        if response.headers.get('Content-Type') != 'application/octet-stream':
            raise _no_glance(client, what, response)
        chunks = iter(body)
        while True:
            try:
                chunk = next(chunks, None)
            except (requests.RequestException, OSError) as e:
                raise exception.GlanceUnavailable(
                    f'Glance at {_where(client)} broke off {what} after '
                    f'{received} of {image.size} bytes ({_reason(e)}): look '
                    f'at its log, then try again.') from None
            if chunk is None:
                return
            received += len(chunk)
            yield chunk


def _get(client, path, what):
    """(response, body) of a GET, where Glance answered well."""
    # glanceclient's own methods take no timeout, and ask for the schema first
    try:
        return client.http_client.get(
            path, timeout=CONF.accel.glance_timeout)
    except glance_exc.HTTPException as e:
        raise _refusal(client, what, e) from None
    except (ks_exc.AuthorizationFailure, ks_exc.MissingAuthPlugin):
        raise exception.BitstreamError(
            f'Glance would be asked for {what}, and there is no token of a '
            f'user to ask with: repeat the operation as the user of the '
            f'server.') from None
    except glance_exc.InvalidEndpoint:
        # glanceclient's word for a timeout
        raise exception.GlanceUnavailable(
            f'Glance at {_where(client)} was asked for {what} and did not '
            f'answer within {CONF.accel.glance_timeout} s ([accel] '
            f'glance_timeout): look whether it runs.') from None
    except (glance_exc.BaseException, ks_exc.ClientException,
            requests.RequestException, OSError) as e:
        raise exception.GlanceUnavailable(
            f'Glance at {_where(client)} was asked for {what} and cannot be '
            f'reached ({_reason(e)}): look at Glance, and at its endpoint in '
            f'[glance] of nova.conf.') from None
    except (KeyError, ValueError):
        # glanceclient stumbles over errors that a proxy makes
        raise exception.GlanceUnavailable(
            f'Glance at {_where(client)} was asked for {what}, and what '
            f'answered was not Glance: look at the proxy before it.') from None


def _refusal(client, what, error) -> exception.AcceleratorError:
    code = error.code
    if code == 401:
        return exception.BitstreamError(
            f'Glance was asked for {what} and does not accept the token of '
            f'the user (401), which has expired or been revoked: log in '
            f'again and repeat the operation.')
    if code == 403:
        return exception.BitstreamError(
            f'Glance was asked for {what} and does not let the user have it '
            f'(403): ask the owner of the image or the operator.')
    if code == 404:
        return exception.BitstreamError(
            f'Glance was asked for {what}, and there is none or the user '
            f'cannot see it (404): correct the image id, or share the image '
            f'with the project.')
    # glanceclient has no number for what it does not know, as 429 and 504
    if isinstance(code, int) and 400 <= code < 500:
        return exception.BitstreamError(
            f'Glance was asked for {what} and refuses '
            f'({_reason(error)}): correct the request.')
    return exception.GlanceUnavailable(
        f'Glance at {_where(client)} was asked for {what} and is out of '
        f'service ({code}, {_reason(error)}): look at its log, then try '
        f'again.')


def _no_glance(client, what, response) -> exception.GlanceUnavailable:
    return exception.GlanceUnavailable(
        f'Glance at {_where(client)} was asked for {what}, and the answer is '
        f'{_shown(response.headers.get("Content-Type"))}, which is not from '
        f'Glance: look at the endpoint in the catalog or [glance] of '
        f'nova.conf.')


def _where(client) -> str:
    return client.http_client.endpoint_override or 'its endpoint'


def _reason(error) -> str:
    """The innermost cause of an error in one printable line."""
    while error.__context__ is not None:
        error = error.__context__
    text = ' '.join(str(error).split())
    text = text.encode('ascii', 'replace').decode()
    return text[:160] or type(error).__name__
