"""Which videos an ingress takes, as plain data. Knows nothing of the YAML."""

from dataclasses import dataclass

from cluster.api.videos.rules import VideoRules


@dataclass(frozen=True, kw_only=True)
class VideoSettings:
    """The videos of a model with a vision tower, and the limits of one ingress.

    token_id         placeholder of the tokens of frames in a prompt, behind the text of `rules`
    max_videos       of one request
    max_video_bytes  of the file of one video, or of all images of a list of frames
    """

    token_id: int
    rules: VideoRules
    max_videos: int = 4
    max_video_bytes: int = 64 * 1024 * 1024
