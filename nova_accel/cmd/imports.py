# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel import profiles: translate Cyborg's device profiles.

Source of the format: Cyborg's API reference, GET /v2/device_profiles.
"""

from collections.abc import Iterator, Mapping
import difflib
import json
import os
import re
import sys
import tempfile
import typing

import yaml

from nova_accel.cmd import configuration
from nova_accel import conf
from nova_accel import exception
from nova_accel import files
from nova_accel import profiles

CONF = conf.CONF

#: names that are safe as file names
_NAME = re.compile('[A-Za-z0-9][A-Za-z0-9._-]{0,99}')


class ImportProfiles(configuration.Reader):
    """Translate Cyborg's device profiles into files of [accel] device_profiles.

    Reads the response of Cyborg's API (GET /v2/device_profiles), as JSON or
    YAML, and prints the changes as a unified diff. Writes only with --write.
    Profiles that cannot be translated are named on stderr, and the exit status
    is 1.
    """

    SERVICE = configuration.API

    def get_parser(self, prog_name):
        parser = super().get_parser(prog_name)
        parser.add_argument('file', metavar='FILE',
                            help='file with the response, - for standard input')
        parser.add_argument('--write', action='store_true',
                            help='write the files of the diff')
        return parser

    def take_action(self, parsed_args):
        configuration.read(parsed_args.config_file, self.SERVICE)
        for profile in _read(parsed_args.file):
            try:
                name, text = translate(profile)
            except exception.InvalidProfile as error:
                self.status = 1
                self.app.stderr.write(f'{error}\n')
                continue
            path = path_of(name)
            difference = list(diff(path, text))
            self.app.stdout.writelines(difference)
            if parsed_args.write and difference:
                _write(path, text)


def path_of(name: str) -> str:
    """Return the path of the file for a profile.

    :raises ConfigurationError: [accel] device_profiles is not a directory.
    """
    directory = CONF.accel.device_profiles
    if os.path.isfile(directory):
        raise exception.ConfigurationError(
            f'[accel] device_profiles is the file {directory}, and each '
            f'profile is written to a file of its own: set the option to '
            f'a directory.')
    return os.path.join(directory, f'{name}.yaml')


def diff(path: str, text: str) -> Iterator[str]:
    """Yield the lines of a unified diff of a file that may not exist yet.

    :raises ConfigurationError: the file cannot be read.
    """
    before = _text_of(path)
    return difflib.unified_diff(
        before.splitlines(True), text.splitlines(True),
        path if before else os.devnull, path)


def translate(profile) -> tuple[str, str]:
    """Return the name of a profile, and the text of its file.

    :param profile: a profile of Cyborg's response.
    :raises InvalidProfile: the profile cannot be translated.
    """
    name = profile.get('name') if isinstance(profile, dict) else None
    if not is_name(name):
        raise exception.InvalidProfile(
            f'The profile {name!r} is not carried over, because its name '
            f'cannot be that of a file: rename it in Cyborg, and in the '
            f'flavors.')
    made = {'name': name}
    if profile.get('description'):
        made['description'] = str(profile['description'])
    made['groups'] = profile.get('groups')
    return name, text_of(made)


def is_name(name: typing.Any) -> typing.TypeGuard[str]:
    """Return whether a name is valid for a profile and its file."""
    return isinstance(name, str) and bool(_NAME.fullmatch(name))


def text_of(made: Mapping[str, typing.Any]) -> str:
    """Return a profile as text of a file of [accel] device_profiles.

    :param made: the profile, with the keys of such a file.
    :raises InvalidProfile: nova-api would refuse the file.
    """
    name = made['name']
    text = yaml.safe_dump(dict(made), sort_keys=False)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, f'{name}.yaml')
        with open(path, 'w', encoding='utf-8') as file:
            file.write(text)
        # use the reader of nova-api
        for error in profiles.load(path).bad.values():
            raise exception.InvalidProfile(
                f'The profile {name!r} is not carried over: '
                f'{error.replace(directory + os.sep, "")}')
    return text


def _read(file):
    try:
        if file == '-':
            found = yaml.safe_load(sys.stdin)
        else:
            with open(file, encoding='utf-8') as stream:
                found = yaml.safe_load(stream)
    except (OSError, yaml.YAMLError, UnicodeDecodeError,
            RecursionError) as error:
        raise exception.ConfigurationError(
            f'The profiles of Cyborg cannot be read from {file} '
            f'({" ".join(str(error).split())}): give the answer of GET '
            f'/v2/device_profiles.') from error
    if isinstance(found, dict):
        if 'device_profiles' in found:
            found = found['device_profiles']
        elif 'device_profile' in found:
            found = [found['device_profile']]
        elif 'name' in found:
            found = [found]
    if not isinstance(found, list) or not found:
        raise exception.ConfigurationError(
            f'{file} has no device profiles, but {json.dumps(found)[:60]}: '
            f'give the answer of GET /v2/device_profiles.')
    return found


def _text_of(path):
    try:
        with open(path, encoding='utf-8') as file:
            return file.read()
    except FileNotFoundError:
        return ''
    except OSError as error:
        raise _refused(path, error) from error


def _write(path, text):
    """Replace a file atomically, because nova-api must never read half of it.
    """
    try:
        files.replace(path, text)
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path, error):
    return exception.ConfigurationError(
        f'The profile file {path} cannot be compared and written '
        f'({error.strerror}): run this as a user that may, or create the '
        f'directory.')
