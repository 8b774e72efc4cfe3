"""The `serve.videos` section of the YAML: limits of videos in requests. Knows nothing of the code that enforces it."""

from pydantic import Field

from workers.section import Section


class VideosConfig(Section):
    """Limits of videos, for models with a vision tower. `serve.images` limits bodies, pixels of a frame and fetches."""

    max_videos: int = Field(4, ge=0, description="Videos of one request.")
    max_video_bytes: int = Field(
        64 * 1024 * 1024, ge=1024, description="Bytes of the file of one video, or of its frames."
    )
    max_frames: int = Field(
        768,
        ge=2,
        description="Frames that are taken of one video; more are thinned out, or refused where a request lists them.",
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        description="Pixels of all frames of a resized video together; null = as the checkpoint has it, which is also "
        "the most.",
    )
