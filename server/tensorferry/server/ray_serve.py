"""Public import path of the Ray Serve application: `tensorferry.server.ray_serve:application`."""

from tensorferry.server.ray.application import Replica, application

__all__ = ["Replica", "application"]
