"""Messages between two ranks, the n-th send of one held against the n-th receive of the other."""

from collections.abc import Iterator, Mapping, Sequence

from shardproof.harness.hangs.standing import Channel, Parted, RankStanding


def _messages(
    by_channel: Mapping[Channel, Sequence[RankStanding]],
) -> Iterator[tuple[Channel, RankStanding, Channel, RankStanding | None]]:
    """Messages to or from a peer, and what that peer issued in answer; of ranks alone whose messages can be counted."""
    for channel, those in by_channel.items():
        group, members, direction = channel
        op, _, peer = direction.partition(" ")
        for one in those if peer else ():
            there = (group, members, f"{'recv' if op == 'send' else 'send'} {one.rank}")
            answer = next((other for other in by_channel.get(there, ()) if other.rank == int(peer)), None)
            if one.counted and (answer is None or answer.counted):
                yield channel, one, there, answer


def unequal(by_channel: Mapping[Channel, Sequence[RankStanding]]) -> Iterator[Parted]:
    """The first message of a pair whose ends have other numbers of bytes."""
    for channel, one, there, answer in _messages(by_channel):
        if answer is None or not channel[2].startswith("send"):
            continue
        sent, received = one.calls.get(channel, {}), answer.calls.get(there, {})
        for number in sorted({*sent} & {*received}):
            sizes = sent[number].size_bytes, received[number].size_bytes
            if None not in sizes and sizes[0] != sizes[1]:
                ranks, call, instead = (one.rank, answer.rank), sent[number], received[number]
                yield Parted(how="message", ranks=ranks, channel=channel, number=number, call=call, instead=instead)
                break


def unmatched(by_channel: Mapping[Channel, Sequence[RankStanding]]) -> Iterator[Parted]:
    """Messages whose other end was not issued: more sends to a peer than receives there, or the reverse."""
    for channel, one, there, answer in _messages(by_channel):
        op, _, peer = channel[2].partition(" ")
        number, latest = (answer.last[there] if answer else 0) + 1, one.latest
        inside = latest is not None and latest[0] == channel
        if one.last[channel] >= number and (op == "recv" or inside):  # a send may be over before it is received
            call, ranks = one.calls.get(channel, {}).get(number), (int(peer),)
            yield Parted(how="behind", ranks=ranks, channel=channel, number=number, call=call, waiting=(one.rank,))
