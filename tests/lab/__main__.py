# Licensed under the Apache License, Version 2.0. See LICENSE.
"""python3 -m tests.lab COMMAND

    build           make what the lab runs in, once
    up              start it
    test [NAME...]  what is proven, in a lab that is up
    prove [NAME...] build, up, test, down; --within MINUTES before: no trial
                    is begun later
    demo            the story of make demo, on the lab's kernel; the lab is
                    started and ended, unless it is up
    shell [COMMAND] in the room; openstack and lab-vm are at hand
    status          which processes run
    down            end it
"""

import os
import shutil
import time

from tests import lab
from tests.lab import build
from tests.lab import room


def start(home):
    # a lab that is up is not to be rebuilt under its feet
    if not room.keeper(home):
        build.build(home)
    room.begin(home)


def test(home, names, **environment):
    return room.enter(home, ['/opt/openstack/bin/python', '-m',
                             'tests.lab.trials', *names], **environment)


def prove(home, names):
    environment = {}
    if names[:1] == ['--within']:
        end = time.time() + 60 * int(names[1])
        names, environment = names[2:], {'LAB_END': str(end)}
    start(home)
    try:
        return test(home, names, **environment)
    finally:
        room.end(home)


def demo(home):
    """Play the story, and keep its page beside that of make demo."""
    was_up = room.keeper(home)
    if not was_up:
        start(home)
    try:
        status = room.enter(
            home, ['/opt/openstack/bin/python', '-m', 'tests.lab.demo'],
            STEP=os.environ.get('STEP', ''))
        if not status:
            target = lab.SOURCE / 'build' / 'lab-demo.html'
            target.parent.mkdir(exist_ok=True)
            shutil.copy(home / 'run/demo.html', target)
            print(f'The same as a page: {target.relative_to(lab.SOURCE)}')
        return status
    finally:
        if not was_up:
            room.end(home)


def down(home):
    build.check_host(home)
    print('The lab is down.' if room.end(home) else 'The lab was not up.')


def main(arguments):
    home = lab.home()
    command, rest = (arguments or ['help'])[0], arguments[1:]
    if command == 'build':
        if room.keeper(home) and not build.ready(home):
            raise lab.Unfit('The lab is up, and its files have changed: make '
                            'lab-down before building.')
        build.build(home)
    elif command == 'up':
        start(home)
        print('The lab is up: make lab-shell enters it, make lab-down ends '
              'it.')
    elif command == 'test':
        return test(home, rest)
    elif command == 'prove':
        return prove(home, rest)
    elif command == 'demo':
        return demo(home)
    elif command == 'shell':
        rc = '/src/tests/lab/shellrc'
        options = (['-c', f'. {rc} > /dev/null\n{" ".join(rest)}'] if rest
                   else ['--rcfile', rc])
        return room.enter(home, ['/bin/bash', *options])
    elif command == 'status':
        print(f'{home}: {"up" if room.keeper(home) else "down"}')
        if room.keeper(home):
            return room.enter(home, ['ps', 'f', '-eo', 'pid,etime,rss,args'])
    elif command == 'down':
        down(home)
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == '__main__':
    lab.run(main)
