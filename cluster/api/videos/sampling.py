"""Which frames of a video a model sees, as transformers' video processors choose them. Knows no files and no sizes."""

import math
from dataclasses import dataclass

import numpy as np

UNKNOWN_FPS = 24.0
"""Frames a second where a file has no rate, as transformers assumes it."""
# GLM-4.6V: durations in seconds up to which so many pairs of frames a second are taken, and the most frames.
_PACES = ((30, 3.0), (300, 1.0), (2400, 0.5))
_MOST_PACED = 640


@dataclass(frozen=True)
class Clip:
    """A video before frames are chosen: its frames, their rate in 1/s, and their size in pixels."""

    num_frames: int
    fps: float
    width: int
    height: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.num_frames / self.fps


def evenly(clip: Clip, fps: float, num_frames: int | None, least: int, most: int) -> list[int]:
    """Return frames at equal distances, the first and the last among them, as Qwen3-VL has it.

    num_frames   how many; None: `fps` for each second, but at least `least` and at most `most`
    """
    if num_frames is None:
        num_frames = min(max(int(clip.num_frames / clip.fps * fps), least), most)
    count = min(num_frames, clip.num_frames)
    return [int(it) for it in np.linspace(0, clip.num_frames - 1, count).round()]


def by_seconds(clip: Clip, fps: float, max_duration: float) -> list[int]:
    """Return `fps` frames of each second, an even number, as GLM-4.5V has it; fewer beyond `max_duration` seconds."""
    last, duration = clip.num_frames - 1, clip.duration
    if duration <= max_duration:
        count = max(1, math.floor(duration * fps))
        found = [math.ceil(number * clip.fps / fps) for number in range(count)]
    else:
        count = int(max_duration * fps)
        if count >= clip.num_frames:
            found = list(range(clip.num_frames))
        else:
            found = [math.ceil(t * clip.fps) for t in np.linspace(0, duration, count)]
    return _even([min(last, it) for it in found])


def by_duration(clip: Clip, per_token: int) -> list[int]:
    """Return an even number of frames, the fewer a second the longer the video is, as GLM-4.6V has it.

    per_token   frames that become tokens together
    """
    last, bounded = clip.num_frames - 1, min(clip.duration, _PACES[-1][0])
    pace = next(pace for seconds, pace in _PACES if bounded <= seconds)
    count = min(max(int(bounded * pace * per_token), per_token), _MOST_PACED)
    found: list[int] = []
    if clip.num_frames >= count:
        found = _paced(clip, 1 / (per_token * pace))
    if len(found) != count:
        # Too many: from all frames. Too few: from the first chosen one to the last chosen one.
        first, end = (found[0], found[-1]) if 0 < len(found) < count else (0, last)
        found = [int(it) for it in np.linspace(first, end, count).astype(int)]
    return _even(found)


def thinned(frames: list[int], most: int) -> list[int]:
    """Return at most `most` of the frames, at equal distances."""
    if len(frames) <= most:
        return frames
    return [frames[int(place)] for place in np.linspace(0, len(frames) - 1, most).round()]


def _paced(clip: Clip, distance: float) -> list[int]:
    """Return the first frame of each `distance` seconds."""
    found: list[int] = []
    due, end, seconds_of_frame = 0.0, int(clip.duration), 1 / clip.fps
    for number in range(clip.num_frames):
        if number * seconds_of_frame >= due:
            due += distance
            found.append(number)
            if due >= end:
                break
    return found


def _even(frames: list[int]) -> list[int]:
    """Return each frame once, and the last one twice where their number is odd."""
    found = list(dict.fromkeys(frames))
    return found + found[-1:] if len(found) % 2 else found
