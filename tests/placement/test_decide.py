"""Who starts where: what one pass decides, drawn before and after."""

from __future__ import annotations

from typing import Any

import pytest

from gangq.placement.board import Ask, Board, Kind, Role, Worker
from gangq.placement.decide import decide
from gangq.placement.fit import Search
from placement.drawn_boards import after, drawn

PICTURES = {
    "a gang fills the host that it leaves least of": (
        """
        h0 AAAA....
        h1 ........
        X 4
        """,
        """
        h0 AAAAXXXX
        h1 ........
        """,
    ),
    "where the scarcer role takes what the other needs, the other one chooses first": (
        """
        h0 ..
        h1 ...
        X 1x2+2x1 strict_spread
        """,
        """
        h0 X.
        h1 XXX
        """,
    ),
    "single jobs are packed like gangs": (
        """
        h0 ........
        h1 AAA.....
        h2 BBBBB...
        x*3 1
        """,
        """
        h0 ........
        h1 AAA.....
        h2 BBBBBxxx
        """,
    ),
    "of a large gang the last host is the tightest that will do": (
        """
        h0 ........
        h1 AAAA....
        h2 ........
        X 10
        """,
        """
        h0 XXXXXXXX
        h1 AAAAXX..
        h2 ........
        """,
    ),
    "all or nothing": (
        """
        h0 AAAA....
        h1 AAAAAA..
        X 7
        """,
        """
        h0 AAAA....
        h1 AAAAAA..
        X waits: room 6 of 7
        """,
    ),
    "strict_pack waits for one host": (
        """
        h0 AAAA....
        h1 AAAAAA..
        X 5 strict_pack
        """,
        """
        h0 AAAA....
        h1 AAAAAA..
        X waits: one_host 4 of 5
        """,
    ),
    "spread takes the roomiest hosts one by one": (
        """
        h0 ..
        h1 ....
        h2 ....
        X 5 spread
        """,
        """
        h0 X.
        h1 XX..
        h2 XX..
        """,
    ),
    "strict_spread never shares a host and leaves large ones whole": (
        """
        h0 ........
        h1 ..
        h2 ..
        X 2 strict_spread
        Y 4 strict_spread
        """,
        """
        h0 ........
        h1 X.
        h2 X.
        Y waits: hosts 3 of 4
        """,
    ),
    "balanced divides evenly": (
        """
        h0 ....
        h1 ....
        X 6 balanced
        """,
        """
        h0 XXX.
        h1 XXX.
        """,
    ),
    "a member gets all of its devices on one worker": (
        """
        h0 AAAAAA..
        h1 AAAAAA..
        X 1x4
        """,
        """
        h0 AAAAAA..
        h1 AAAAAA..
        X waits: fragmented 0 of 1
        """,
    ),
    "the smallest devices that will do": (
        """
        h0 .... vram=80,24,24,80
        X 1 vram=20
        Y 2 vram=40
        """,
        """
        h0 YX.Y
        """,
    ),
    "a pair of linked devices for who needs two, what is left of a broken pair for who needs one": (
        """
        h0 .A...... link=00112233
        X 1x2
        Y 1
        """,
        """
        h0 YAXX....
        """,
    ),
    "linked devices for who needs many, and no broken group where a whole one will do": (
        """
        h0 A....... link=00001111
        X 1x4
        Y 1x3
        """,
        """
        h0 AYYYXXXX
        """,
    ),
    "where no group is large enough, whole groups": (
        """
        h0 .A...... link=00112233
        X 1x4
        """,
        """
        h0 .AXXXX..
        """,
    ),
    "a link is not worth a larger device": (
        """
        h0 ...A link=0011 vram=80,80,24,24
        X 1
        """,
        """
        h0 ..XA
        """,
    ),
    "nor are two linked ones": (
        """
        h0 .... link=0011 vram=24,80,80,80
        X 1x2
        Y 1x2 vram=40
        """,
        """
        h0 XXYY
        """,
    ),
    "members with a GPU each on one worker choose as one with many does": (
        """
        h0 .A...... link=00112233
        X 2
        Y 3
        """,
        """
        h0 YAXXYY..
        """,
    ),
    "members with several GPUs choose one after another: each on as few links as can be": (
        """
        h0 ........ link=00001111
        X 2x3
        """,
        """
        h0 XXX.XXX.
        """,
    ),
    "no job waits because a planned start keeps a pair that is idle until then": (
        """
        plans=1
        h0 ..AAAA link=001111
        A ends=100
        X 2x2
        Y 1x2 ends=1000
        """,
        """
        h0 YYAAAA
        X starts in 100 on h0
        """,
    ),
    "nor because what ends before the planned start takes what others could use for longer": (
        """
        plans=1
        h0 ...AA link=01122
        A ends=100
        X 1x4
        y 1 ends=50
        Z 1 ends=1000
        """,
        """
        h0 Zy.AA
        X starts in 100 on h0
        y ends by 100
        """,
    ),
    "devices to be avoided are none": (
        """
        h0 ....
        X 4 not=1
        Y 3 not=1
        """,
        """
        h0 Y.YY
        X waits: room 3 of 4
        """,
    ),
    "a closed worker is none": (
        """
        h0 ----
        h1 ....
        X 5
        """,
        """
        h0 ----
        h1 ....
        X waits: room 4 of 5
        """,
    ),
    "the workers of a host are one host": (
        """
        h0 .. host=a
        w1 .. host=a
        h2 ..
        X 4 strict_pack
        """,
        """
        h0 XX
        w1 XX
        h2 ..
        """,
    ),
    "only workers of a class that serves it": (
        """
        h0 .... class=1
        h1 ....
        X 4 class=1
        Y 5
        """,
        """
        h0 XXXX
        h1 ....
        Y waits: room 4 of 5
        """,
    ),
    "memory and processors count": (
        """
        h0 ........ mem=64 cpus=8
        X 3 mem=20
        Y 2 cpus=4
        Z 1
        """,
        """
        h0 XXXYYZ..
        """,
    ),
    "slots without GPUs": (
        """
        h0 ____
        h1 aa__
        X 2 cpu
        """,
        """
        h0 ____
        h1 aaXX
        """,
    ),
    "a required domain holds all, and the tightest is taken": (
        """
        levels rack host
        h0 .... rack=r0
        h1 .... rack=r0
        h2 .... rack=r1
        h3 AA.. rack=r1
        X 6 require=rack
        Y 8 require=rack
        Z 9 require=rack
        """,
        """
        h0 YYYY
        h1 YYYY
        h2 XXXX
        h3 AAXX
        Z waits: one_domain 0 of 9
        """,
    ),
    "a preferred domain is left when none holds all": (
        """
        levels rack host
        h0 .... rack=r0
        h1 .... rack=r1
        X 6 prefer=rack
        """,
        """
        h0 XXXX
        h1 XX..
        """,
    ),
    "what is to be kept apart": (
        """
        h0 A...
        h1 ....
        A apart=db
        X 1 apart=db
        Y 1 apart=db
        """,
        """
        h0 A...
        h1 X...
        Y waits: apart 0 of 1
        """,
    ),
    "a host that lost a worker is the last choice": (
        """
        h0 .... doubtful
        h1 ........
        X 4
        Y 6
        """,
        """
        h0 YYYY
        h1 XXXXYY..
        """,
    ),
    "a gang avoids the host where it failed while others will do": (
        """
        h0 ....
        h1 ........
        X 4 avoid=h0
        Y 4
        Z 4 avoid=h0,h1
        """,
        """
        h0 YYYY
        h1 XXXXZZZZ
        """,
    ),
    "where its model is loaded it starts rather than where it is tight": (
        """
        h0 AA..
        h1 .... warm=llama
        x*1 1 model=llama
        """,
        """
        h0 AA..
        h1 x...
        """,
    ),
    "roles sit beside one another": (
        """
        h0 ....
        h1 ....
        X 1x2+2x3
        """,
        """
        h0 ....
        h1 ....
        X waits: room 0 of 1
        """,
    ),
    "the scarcest role first": (
        """
        h0 ....
        h1 ..
        X 2x1+1x4
        """,
        """
        h0 XXXX
        h1 XX
        """,
    ),
    "an elastic role takes what is there": (
        """
        h0 ......
        X 2-4
        Y 1-9
        Z 1
        """,
        """
        h0 XXXXYY
        Z waits: room 0 of 1
        """,
    ),
    "an elastic role keeps to the limit of its queue": (
        """
        h0 ......
        queue a max_gpus=3
        X 2-6 queue=a
        """,
        """
        h0 XXX...
        """,
    ),
    "a missing member sits beside the others": (
        """
        levels rack host
        h0 ..AA rack=r0
        h1 ...A rack=r1
        h2 A... rack=r1
        X 3 require=rack missing=1 mates=2
        """,
        """
        h0 ..AA
        h1 X..A
        h2 A...
        """,
    ),
    "a missing member of a strictly spread gang sits on another host": (
        """
        h0 A..
        h1 A..
        h2 ......
        X 3 strict_spread missing=1 mates=0,1
        """,
        """
        h0 A..
        h1 A..
        h2 X.....
        """,
    ),
}


@pytest.mark.parametrize("picture", PICTURES)
def test_where_it_sits(picture: str) -> None:
    before, expected = PICTURES[picture]
    assert after(before) == drawn(expected)


TURNS = {
    "higher priority first, then age": (
        """
        h0 ..
        X 1
        Y 1 prio=1
        Z 1
        """,
        """
        h0 YX
        Z waits: room 0 of 1
        """,
    ),
    "in fifo nobody passes, whatever his priority": (
        """
        h0 AA
        queue default policy=fifo
        X 1
        Y 1 prio=5
        """,
        """
        h0 AA
        X waits: room 0 of 1
        Y waits: room 0 of 1
        """,
    ),
    "the largest first": (
        """
        h0 ....
        queue default policy=largest_first
        X 1
        Y 4
        """,
        """
        h0 YYYY
        X waits: room 0 of 1
        """,
    ),
    "fair between submitters, by what they use now": (
        """
        h0 AA....
        queue default policy=fair
        A by=ann
        x*4 1 by=ann
        y*3 1 by=bob
        """,
        """
        h0 AAyyxy
        x waits: room 0 of 1
        """,
    ),
    "queues share by weight": (
        """
        h0 ......
        queue a weight=2
        queue b
        x*9 1 queue=a
        y*9 1 queue=b
        """,
        """
        h0 xyxxyx
        y waits: room 0 of 1
        x waits: room 0 of 1
        """,
    ),
    "who is guaranteed something goes before who borrows": (
        """
        h0 AA..
        queue a least_gpus=4
        queue b
        A queue=a
        x*4 1 queue=b
        y*4 1 queue=a
        """,
        """
        h0 AAyy
        x waits: room 0 of 1
        y waits: room 0 of 1
        """,
    ),
    "a paused queue and what is below it": (
        """
        h0 ..
        queue a paused
        queue a.b
        X 1 queue=a.b
        Y 1
        """,
        """
        h0 Y.
        X waits: paused
        """,
    ),
    "a quota of an ancestor, counted with its children": (
        """
        h0 AA......
        queue a max_gpus=4
        queue a.b
        queue a.c
        A queue=a.c
        X 3 queue=a.b
        Y 2 queue=a.b
        """,
        """
        h0 AAYY....
        X waits: quota 2 of 3
        """,
    ),
    "behind one of a lower priority none counts for more where age alone counts": (
        """
        h0 ..
        queue q policy=fifo
        X 1 queue=q
        Y 1 queue=q prio=5
        Z 1
        """,
        """
        h0 XZ
        Y waits: room 0 of 1
        """,
    ),
    "a member that is replaced is of a gang that counts already": (
        """
        h0 A...
        queue q gangs=2
        A queue=q
        A 2 queue=q missing=1 mates=0
        Y 1 queue=q
        """,
        """
        h0 AAY.
        """,
    ),
    "limits on what runs and on submitters": (
        """
        h0 A.......
        queue a gangs=1
        queue b each_gpus=2
        A queue=a
        X 1 queue=a
        Y 2 queue=b
        Z 1 queue=b
        V 1 queue=b by=you
        """,
        """
        h0 AYYV....
        X waits: running_limit 0 of 1
        Z waits: submitter_limit 0 of 1
        """,
    ),
    "a limit key counts the jobs that name it in every queue, members each": (
        """
        h0 a.......
        limit k 4
        queue b
        a key=k
        X 2 key=k
        y*3 1 queue=b key=k
        z 1 queue=b
        """,
        """
        h0 ayXXz...
        y waits: limit_key 0 of 1
        """,
    ),
    "a limit key lets nothing of an elastic gang start that is above it": (
        """
        h0 ....
        limit k 1
        X 2 key=k
        Y 1 key=k
        """,
        """
        h0 Y...
        X waits: limit_key 1 of 2
        """,
    ),
    "a limit lets as many single jobs start as it allows": (
        """
        h0 ....
        queue default jobs=3
        x*9 1
        """,
        """
        h0 xxx.
        x waits: running_limit 0 of 1
        """,
    ),
}


@pytest.mark.parametrize("picture", TURNS)
def test_whose_turn_it_is(picture: str) -> None:
    before, expected = TURNS[picture]
    assert sorted(after(before).splitlines()) == sorted(drawn(expected).splitlines())


PLANS = {
    "a planned start at the end of what runs": (
        """
        plans=1
        h0 AAAAbb..
        A ends=600
        b ends=60
        X 6
        """,
        """
        h0 AAAAbb..
        X starts in 600 on h0
        """,
    ),
    "what ends before the planned start may pass, what would delay it may not": (
        """
        plans=1
        h0 AAAA....
        A ends=600
        X 8
        Y 2 ends=500
        Z 2 ends=700
        """,
        """
        h0 AAAAYY..
        X starts in 600 on h0
        Z waits: planned_start 600 of 700
        """,
    ),
    "beside a planned start there may be room for longer work": (
        """
        plans=1
        h0 AAAA....
        h1 ....
        A ends=600
        X 6 strict_pack
        Z 2 ends=9999
        Y 3 ends=9999
        V 2 ends=9999
        """,
        """
        h0 AAAA..ZZ
        h1 YYY.
        X starts in 600 on h0
        V waits: planned_start 600 of 9999
        """,
    ),
    "a single job gets a planned start like a gang": (
        """
        plans=1
        h0 AAAAAA..
        A ends=600
        x*1 1x8
        y*4 1 ends=700
        """,
        """
        h0 AAAAAA..
        x starts in 600 on h0
        y waits: planned_start 600 of 700
        """,
    ),
    "a place ends by the planned start it would delay": (
        """
        plans=1
        h0 AAAA....
        A ends=600
        X 8
        y*2 1 ends=100
        """,
        """
        h0 AAAAyy..
        y ends by 600
        y ends by 600
        X starts in 600 on h0
        """,
    ),
    "the second planned start counts on the first": (
        """
        plans=2
        h0 AAAA
        A ends=600
        X 4 ends=100
        Y 4 ends=100
        """,
        """
        h0 AAAA
        X starts in 600 on h0
        Y starts in 700 on h0
        """,
    ),
    "one that ends before a planned start fits, though one at an earlier moment was planned meanwhile": (
        """
        plans=3
        h0 AAAA....
        h1 BB class=1
        A ends=1000
        B ends=100
        X 8
        Y 2 ends=1500
        Z 2 class=1
        V 2 ends=500
        """,
        """
        h0 AAAAVV..
        h1 BB
        X starts in 1000 on h0
        Y starts in 4600 on h0
        Z starts in 100 on h1
        """,
    ),
    "a planned start takes nothing from one that comes when it has ended": (
        """
        plans=3
        h0 AAAAAA__
        h1 B
        A ends=100
        B ends=1000
        X 2 cpu strict_spread
        Y 4 cpu strict_pack ends=400
        Z 5 cpu strict_pack ends=1500
        W 1 cpu ends=5000
        """,
        """
        h0 AAAAAAW_
        h1 B
        X starts in 1000 on h0 h1
        Y starts in 100 on h0
        Z starts in 500 on h0
        """,
    ),
    "each role counts what those before it take beside a planned start": (
        """
        plans=1
        w0 AA__
        A ends=100
        X 3 cpu
        Y 1+1 cpu ends=1000
        """,
        """
        w0 AA__
        X starts in 100 on w0
        Y waits: planned_start 100 of 1000
        """,
    ),
    "seats that are kept are its own though a planned start of another comes before its end": (
        """
        plans=1
        h0 ....BBBB
        B ends=100
        Y 4 prio=5
        X 4 prio=5 kept=XXXX....
        """,
        """
        h0 XXXXBBBB
        Y starts in 100 on h0
        """,
    ),
    "more than so many get none": (
        """
        plans=1
        h0 AAAA
        A ends=600
        X 4 ends=100
        Y 4 ends=100
        """,
        """
        h0 AAAA
        X starts in 600 on h0
        Y waits: room 0 of 4
        """,
    ),
    "what starts in this pass ends too": (
        """
        plans=1
        h0 ....
        X 3 ends=50
        Y 4
        """,
        """
        h0 XXX.
        Y starts in 50 on h0
        """,
    ),
    "what will never fit takes no planned start": (
        """
        plans=1
        h0 AAAA
        A ends=600
        X 5
        Y 4
        """,
        """
        h0 AAAA
        X waits: infeasible 0 of 5
        Y starts in 600 on h0
        """,
    ),
}


@pytest.mark.parametrize("picture", PLANS)
def test_planned_starts(picture: str) -> None:
    before, expected = PLANS[picture]
    assert sorted(after(before).splitlines()) == sorted(drawn(expected).splitlines())


STOPS = {
    "what victims and those that leave already give back is taken before what is idle until then": (
        """
        victims=1 grace=10
        h0 ..baa
        b leaving ends=5
        X 1x4 prio=1
        Y 1
        """,
        """
        h0 .Ybaa
        X stops a
        X starts in 10 on h0
        """,
    ),
    "the lowest priority goes, and no more than is needed": (
        """
        victims=8
        h0 AAAABBBB
        h1 CCCC....
        A prio=1
        B prio=2
        C prio=0
        X 8 prio=5
        """,
        """
        h0 AAAABBBB
        h1 CCCC....
        X stops C
        X starts in 30 on h1
        """,
    ),
    "of equal priority the least work is lost": (
        """
        victims=8
        h0 AAAABBBB
        A lost=100
        B lost=10
        X 4 prio=1
        """,
        """
        h0 AAAABBBB
        X stops B
        X starts in 30 on h0
        """,
    ),
    "what leaves already is lost to its queue, so no more of it goes than its guarantee allows": (
        """
        victims=8
        h0 AABB
        queue a least_gpus=4
        queue b least_gpus=2
        A queue=b leaving ends=5
        B queue=b
        X 4 queue=a
        """,
        """
        h0 AABB
        X waits: room 0 of 4
        """,
    ),
    "what is on a closed worker would give no room": (
        """
        victims=8
        h0 AA closed
        h1 BB
        queue a least_gpus=2
        queue b least_gpus=2
        A queue=b
        B queue=b lost=5
        X 2 queue=a
        """,
        """
        h0 AA
        h1 BB
        X stops B
        X starts in 30 on h1
        """,
    ),
    "where what leaves already makes room, nobody else stops": (
        """
        victims=8
        h0 AABB
        A leaving ends=5
        X 2 prio=5
        """,
        """
        h0 AABB
        X waits: room 0 of 2
        """,
    ),
    "missing members get no planned start": (
        """
        plans=9 victims=0
        h0 AAAA
        A ends=100
        X 2 strict_pack prio=1 missing=1 mates=0
        """,
        """
        h0 AAAA
        X waits: room 0 of 1
        """,
    ),
    "nobody is stopped in vain": (
        """
        victims=8
        h0 AAAABBBB
        A prio=0
        B prio=9
        X 8 prio=5
        """,
        """
        h0 AAAABBBB
        X waits: room 0 of 8
        """,
    ),
    "nor for an equal": (
        """
        victims=8
        h0 AAAA
        X 4
        """,
        """
        h0 AAAA
        X waits: room 0 of 4
        """,
    ),
    "nor who may not be": (
        """
        victims=8
        h0 AAAA
        A fixed
        X 4 prio=9
        """,
        """
        h0 AAAA
        X waits: room 0 of 4
        """,
    ),
    "single jobs stop and are stopped for like gangs": (
        """
        victims=8
        h0 abcdefgi
        x*1 1x4 prio=5
        c lost=9
        """,
        """
        h0 abcdefgi
        x stops a b d e
        x starts in 30 on h0
        """,
    ),
    "what is leaving is waited for": (
        """
        victims=8
        h0 AAAABBBB
        A leaving
        X 4 prio=5 kept=XXXX
        """,
        """
        h0 AAAABBBB
        X waits: stopping 0 of 4
        """,
    ),
    "what others left for it is its own": (
        """
        victims=8
        h0 ....BBBB
        B fixed
        Y 4 prio=5
        X 4 prio=5 kept=XXXX....
        """,
        """
        h0 XXXXBBBB
        Y waits: room 0 of 4
        """,
    ),
    "a guarantee takes back what others borrowed, and no more than they have beyond theirs": (
        """
        victims=8
        h0 AABBCC
        queue a least_gpus=2
        queue b least_gpus=2
        A queue=b
        B queue=b lost=5
        C queue=b lost=9
        X 2 queue=a
        Y 2 queue=a
        """,
        """
        h0 AABBCC
        X stops A
        X starts in 30 on h0
        Y waits: room 0 of 2
        """,
    ),
    "at most so many victims a pass": (
        """
        victims=2
        h0 abcd
        X 4 prio=1
        """,
        """
        h0 abcd
        X waits: room 0 of 4
        """,
    ),
    "two that displace take different victims": (
        """
        victims=8
        h0 AAAABBBB
        X 4 prio=1
        Y 4 prio=1
        """,
        """
        h0 AAAABBBB
        X stops A
        X starts in 30 on h0
        Y stops B
        Y starts in 30 on h0
        """,
    ),
    "a gang displaces although a missing member of its kind cannot, beside its mates": (
        """
        victims=8
        h0 AA
        h1 BB
        A prio=1
        X 2 strict_pack prio=1 missing=1 mates=0
        Y 2 strict_pack prio=1
        """,
        """
        h0 AA
        h1 BB
        X waits: room 0 of 1
        Y stops B
        Y starts in 30 on h1
        """,
    ),
    "what is on a drained host moves when it fits elsewhere": (
        """
        h0 AAAA---- closed
        h1 .....
        h2 CCCC---- closed
        A drained
        C drained
        """,
        """
        h0 AAAA----
        h1 .....
        h2 CCCC----
        A stops A
        """,
    ),
    "one that cannot move takes nothing from another that can": (
        """
        plans=1
        h0 AAb- slots=4 closed
        h1 ABB....... slots=6
        A drained
        b drained
        B ends=50
        X 4
        """,
        """
        h0 AAb-
        h1 ABB.......
        X starts in 50 on h1
        b stops b
        """,
    ),
    "and for one that ends before a planned start, where for another it was in vain": (
        """
        plans=3 victims=1
        h0 AAAABB..
        h1 CC class=1
        A ends=1000 fixed
        B ends=900
        C ends=100 fixed
        X 8 prio=9
        Y 1x4 prio=5 ends=1500
        Z 2 class=1 prio=5
        V 1x4 prio=5 ends=500
        """,
        """
        h0 AAAABB..
        h1 CC
        X starts in 1000 on h0
        Y starts in 4600 on h0
        Z starts in 100 on h1
        V stops B
        V starts in 30 on h0
        """,
    ),
    "one that stops for another is not moved besides": (
        """
        victims=8
        h0 A closed
        h1 AA vram=80
        h2 ....
        A drained
        X 2 vram=40 prio=5
        """,
        """
        h0 A
        h1 AA
        h2 ....
        X stops A
        X starts in 30 on h1
        """,
    ),
    "what a unit leaves beyond what is kept counts for the next, which tells only others": (
        """
        victims=8
        h0 AABBC
        X 1 prio=5
        Y 4 prio=5
        """,
        """
        h0 AABBC
        X stops A
        X starts in 30 on h0
        Y stops B C
        Y starts in 30 on h0
        """,
    ),
    "an ask of a higher priority is judged anew, though an older one of its kind was refused": (
        """
        victims=8
        h0 AA
        queue q policy=fifo
        A prio=2
        X 2 queue=q
        Y 2 queue=q prio=5
        """,
        """
        h0 AA
        X waits: room 0 of 2
        Y stops A
        Y starts in 30 on h0
        """,
    ),
    "one that needs more to stop than a pass may tell waits, whatever they hold": (
        """
        victims=1
        h0 AB
        X 2 cpu prio=5
        """,
        """
        h0 AB
        X waits: room 0 of 2
        """,
    ),
    "what waits in a queue that displaces nobody waits": (
        """
        victims=8
        h0 AA
        queue q meek
        X 2 queue=q prio=5
        Y 2 prio=4
        """,
        """
        h0 AA
        X waits: room 0 of 2
        Y stops A
        Y starts in 30 on h0
        """,
    ),
    "what was told in this pass is lost to its queue, which keeps its guarantee": (
        """
        victims=8
        h0 AABB
        queue a least_gpus=2
        A queue=a
        B queue=a
        X 2 prio=5
        Y 2 prio=5
        """,
        """
        h0 AABB
        X stops A
        X starts in 30 on h0
        Y waits: room 0 of 2
        """,
    ),
    "what was told in this pass keeps nothing apart from what starts when it has gone": (
        """
        victims=8
        h0 AB
        A apart=db
        X 1 prio=5
        Y 1 prio=5 apart=db
        """,
        """
        h0 AB
        X stops A
        X starts in 30 on h0
        Y stops B
        Y starts in 30 on h0
        """,
    ),
    "within a queue that is guaranteed its share one displaces another": (
        """
        victims=8
        h0 AA
        queue a least_gpus=2
        A queue=a
        X 2 queue=a prio=5
        """,
        """
        h0 AA
        X stops A
        X starts in 30 on h0
        """,
    ),
    "what leaves a drained host already is not moved": (
        """
        h0 A closed
        h1 .
        A drained leaving
        """,
        """
        h0 A
        h1 .
        """,
    ),
}


@pytest.mark.parametrize("picture", STOPS)
def test_who_is_told_to_stop(picture: str) -> None:
    before, expected = STOPS[picture]
    assert sorted(after(before).splitlines()) == sorted(drawn(expected).splitlines())


def test_an_elastic_role_that_finds_every_slot_taken_is_not_tried_in_other_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gang of a hundred such roles took seconds of a pass."""
    roles = tuple(Role(name=f"r{n}", least=1, most=1000) for n in range(100))
    workers = tuple(Worker(n, f"w{n}", f"h{n}", slots=8) for n in range(1, 61))
    seats, calls = Search.seats, 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return seats(*arguments, **named)

    monkeypatch.setattr(Search, "seats", counted)
    (started,) = decide(Board(0.0, workers, kinds=(Kind(1, roles, "default"),), asks=(Ask("g1", 1),)))
    assert len(started.seats) == 60 * 8
    assert calls < 10
