"""All steps on one small real model; the only download is from a package registry."""
