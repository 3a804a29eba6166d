# Licensed under the Apache License, Version 2.0. See LICENSE.
"""python3 -m tests.tempest COMMAND

    build            make what the cloud runs in, once
    up [lab]         start it; lab: its compute host is the virtual machine of
                     the lab, for the suite of that name
    test [SUITE...]  run the suites and give the verdict, in a cloud that is up;
                     --part: only what part.txt has; --only REGEX
    prove [SUITE...] build, up, test, down; with the same options
    down             end it
"""

from tests import lab
from tests.lab import build as lab_build
from tests.lab import room
from tests.tempest import build, home


def start(place, suites):
    is_lab = 'lab' in suites
    # a cloud that is up is not built again
    if not room.keeper(place):
        build.make(place)
        if is_lab:
            lab_build.build(lab.home())
    room.begin(place, 'tests.tempest.in_lab' if is_lab else
               'tests.tempest.first')


def test(place, arguments):
    return room.enter(place, ['/opt/openstack/bin/python', '-m',
                              'tests.tempest.judge', *arguments])


def main(arguments):
    place = home()
    command, rest = (arguments or ['help'])[0], arguments[1:]
    if command == 'build':
        build.make(place)
    elif command == 'up':
        start(place, rest)
    elif command == 'test':
        return test(place, rest)
    elif command == 'prove':
        start(place, rest)
        try:
            return test(place, rest)
        finally:
            room.end(place)
    elif command == 'down':
        print('The cloud is down.' if room.end(place) else
              'The cloud was not up.')
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == '__main__':
    lab.run(main)
