"""The pages of the shop, and Django's admin."""

from django.contrib import admin
from django.urls import path

from .views import orders

urlpatterns = [path("orders", orders), path("admin/", admin.site.urls)]
