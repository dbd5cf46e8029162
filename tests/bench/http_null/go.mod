module baton/http_null

go 1.23
